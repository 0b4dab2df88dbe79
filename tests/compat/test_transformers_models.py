"""What transformers keeps of models, configs and DeepSpeed, of the releases that are installed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import CONFIG_MAPPING, GPT2Config, GPT2LMHeadModel, GPT2Model, LlamaConfig, OPTConfig, OPTModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled, set_hf_deepspeed_config

from hf_posswap.compat import transformers_models
from hf_posswap.compat.transformers_models import is_deepspeed_engine, load_whole
from hf_posswap.testing.tiny import tiny_config

TINY = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)
WPE = "transformer.wpe.weight"


def saved(model: Any, folder: Path) -> set[str]:
    """Return the names of the weights that `model` writes."""
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())


@pytest.fixture
def _unfilled_memory_is_nan() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("_unfilled_memory_is_nan")
def test_without_initialising() -> None:
    assert torch.utils.deterministic.fill_uninitialized_memory
    with transformers_models.without_initialising():
        assert GPT2Model(TINY).wte.weight.isnan().all()
        tied = GPT2LMHeadModel(TINY)
        assert tied.lm_head.weight is tied.transformer.wte.weight
    assert GPT2Model(TINY).wte.weight.isfinite().all()


def test_building_on_meta() -> None:
    with transformers_models.building_on_meta():
        model = GPT2LMHeadModel(TINY)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    assert model.lm_head.weight is model.transformer.wte.weight
    assert GPT2Model(TINY).wte.weight.device.type == "cpu"


def test_mark_initialised() -> None:
    class Filled(GPT2Model):
        """Fills whatever it is given."""

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Embedding):
                nn.init.constant_(module.weight, 7.0)

    model = Filled(TINY)
    for marked in (False, True):
        model.wpe = nn.Embedding(3, 8)
        before = model.wpe.weight.detach().clone()
        if marked:
            transformers_models.mark_initialised(model.wpe)
        model.initialize_weights()
        assert torch.equal(model.wpe.weight, before) == marked


def test_is_initialised(tmp_path: Path) -> None:
    built = GPT2LMHeadModel(TINY)
    assert not transformers_models.is_initialised(nn.Parameter(torch.zeros(1)))
    weight = nn.Parameter(torch.zeros(1))
    transformers_models.mark_initialised(weight)
    assert transformers_models.is_initialised(weight)
    built.save_pretrained(tmp_path)
    seen: list[bool] = []

    class Asking(GPT2LMHeadModel):
        """Notes of each table whether the checkpoint gave it, when transformers fills the rest."""

        def initialize_weights(self) -> None:
            seen.extend(map(transformers_models.is_initialised, self.parameters()))

    Asking.from_pretrained(tmp_path)
    assert seen
    assert all(seen)


def test_fill_weights() -> None:
    model, table = GPT2Model(GPT2Config(**TINY.to_diff_dict() | {"initializer_range": 50.0})), nn.Embedding(99, 8)
    transformers_models.fill_weights(GPT2Model, model, table)
    assert 40 < table.weight.std() < 60


def test_let_record_outputs() -> None:
    class Ours(GPT2Model):
        """A model that nobody builds."""

    model, words = GPT2Model(TINY), torch.ones(1, 3, dtype=torch.long)
    model.__class__ = Ours
    assert model(words, output_hidden_states=True).hidden_states is None
    transformers_models.let_record_outputs(Ours)
    assert len(model(words, output_hidden_states=True).hidden_states) == TINY.n_layer + 1


def test_unsaved_keys() -> None:
    from transformers import MarianMTModel

    assert transformers_models.unsaved_keys(GPT2LMHeadModel) == ()
    tables = {"model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"}
    assert tables <= set(transformers_models.unsaved_keys(MarianMTModel))  # they are computed


def test_set_unsaved_keys(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(TINY)
    assert WPE in saved(model, tmp_path / "all")
    before = transformers_models.set_unsaved_keys(model, (WPE,))
    assert transformers_models.unsaved_keys(model) == (WPE,)
    assert transformers_models.unsaved_keys(type(model)) == ()
    assert WPE not in saved(model, tmp_path / "fewer")
    assert transformers_models.set_unsaved_keys(model, before) == (WPE,)
    assert WPE in saved(model, tmp_path / "again")
    assert vars(model).get("_keys_to_ignore_on_save") is before


def test_tensor_parallel_size() -> None:
    model = GPT2LMHeadModel(TINY)
    assert transformers_models.tensor_parallel_size(model) == 1
    assert "_tp_size" in dir(model)  # transformers sets it when it loads a model with a tp_plan
    model._tp_size = 2
    assert transformers_models.tensor_parallel_size(model) == 2


def test_give_config_class() -> None:
    class Ours(LlamaConfig):
        """A config of ours."""

        def to_json_string(self, use_diff: bool = True) -> str:
            return "ours"

    config = LlamaConfig(hidden_size=64)
    before = config.to_json_string()
    transformers_models.give_config_class(config, Ours)
    assert isinstance(config, Ours)
    assert config.hidden_size == 64
    assert config.to_json_string() == "ours"
    transformers_models.give_config_class(config, LlamaConfig)
    assert config.to_json_string() == before


def test_config_validators() -> None:
    config = LlamaConfig()
    validators = {check.__name__: check for check in transformers_models.config_validators(LlamaConfig)}
    assert "validate_rope" in validators  # the one that a swapped config leaves out, by its name
    config.hidden_size, config.num_attention_heads = 10, 3
    with pytest.raises(ValueError, match="hidden size"):
        validators["validate_architecture"](config)


def test_layer_configs() -> None:
    assert transformers_models.layer_configs(TINY) == [TINY]
    config = tiny_config(CONFIG_MAPPING["gemma4_text"])
    layers = transformers_models.layer_configs(config)
    if len(layers) > 1:  # since 5.24
        assert len(layers) == config.num_hidden_layers
        with pytest.raises(RuntimeError, match="may vary across layers"):
            _ = config.head_dim
    assert all(layer.head_dim > 0 for layer in layers)


def test_lasting_values(tmp_path: Path) -> None:
    GPT2LMHeadModel(TINY).save_pretrained(tmp_path / "one")
    GPT2LMHeadModel(TINY).save_pretrained(tmp_path / "other")
    one, other = (GPT2LMHeadModel.from_pretrained(tmp_path / name).config for name in ("one", "other"))
    assert one.name_or_path != other.name_or_path
    assert transformers_models.lasting_values(one) == transformers_models.lasting_values(other)
    assert transformers_models.lasting_values(one)["n_positions"] == 16
    one.n_positions = 32
    assert transformers_models.lasting_values(one) != transformers_models.lasting_values(other)
    one.attn_implementation = "eager"  # as in the values of a swapped config, which are meant to be refused
    assert "attn_implementation" not in transformers_models.lasting_values(one)


@pytest.mark.parametrize("kind", ["big_bird", "megatron_bert", "rembert", "roformer"])
def test_masks_the_future(kind: str) -> None:
    """Whether a decoder of the kind sees its future in this release, found by changing the future."""
    from hf_posswap.testing.tiny import tiny_model

    code = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    name = {"big_bird": "BigBird", "megatron_bert": "MegatronBert", "rembert": "RemBert", "roformer": "RoFormer"}[kind]
    model = tiny_model(f"{name}ForCausalLM", meta=False)
    words = torch.arange(1, 9)[None]
    other = words.clone()
    other[0, -1] = 40
    with torch.no_grad():
        same = torch.equal(model(words).logits[:, :-1], model(other).logits[:, :-1])
    assert transformers_models.masks_the_future(code) == same


def test_opt_lacks_final_norm() -> None:
    sizes: dict[str, Any] = {"hidden_size": 8, "ffn_dim": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    for lacks in (False, True):
        config = OPTConfig(**sizes, word_embed_proj_dim=8, vocab_size=11, _remove_final_layer_norm=lacks)
        assert transformers_models.opt_lacks_final_norm(config) == lacks
        assert (OPTModel(config).decoder.final_layer_norm is None) == lacks


def test_model_under_construction() -> None:
    seen: list[tuple[str, Any]] = []

    class Asking(GPT2Config):
        """Notes what is set, and by the constructor of which model."""

        def __setattr__(self, name: str, value: Any) -> None:
            seen.append((name, transformers_models.model_under_construction(name)))
            super().__setattr__(name, value)

    config = Asking(**TINY.to_diff_dict())
    assert {built for _, built in seen} == {None}
    seen.clear()
    model = GPT2Model(config)
    assert [built for _, built in seen if built is not None] == [model]
    assert seen[0][1] is model  # before the model has anything
    seen.clear()
    model.set_attn_implementation("eager")
    config._attn_implementation = "sdpa"
    config._experts_implementation = "eager"
    assert {built for _, built in seen} == {None}
    assert len(seen) > 2


def test_without_origin() -> None:
    inner = {"_commit_hash": "a", "layers": 2}
    values = {"transformers_version": "5", "_name_or_path": "here", "text_config": inner, "architectures": ["A"]}
    assert transformers_models.without_origin(values) == {"text_config": {"layers": 2}, "architectures": ["A"]}


def test_without_origin_knows_what_a_load_adds(tmp_path: Path) -> None:
    built = GPT2LMHeadModel(TINY)
    built.save_pretrained(tmp_path)
    before, after = built.config.to_dict(), GPT2LMHeadModel.from_pretrained(tmp_path).config.to_dict()
    assert before != after
    assert transformers_models.without_origin(before) == transformers_models.without_origin(after)


class Sharding:
    """What a Trainer leaves behind under ZeRO-3."""

    def is_zero3(self) -> bool:
        return True


def test_load_whole() -> None:
    left = Sharding()
    set_hf_deepspeed_config(left)
    assert is_deepspeed_zero3_enabled()
    load_whole()
    assert not is_deepspeed_zero3_enabled()


def test_is_deepspeed_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_deepspeed_engine(nn.Linear(2, 2))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    deepspeed = pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    assert not is_deepspeed_engine(nn.Linear(2, 2))
    assert is_deepspeed_engine(deepspeed.DeepSpeedEngine.__new__(deepspeed.DeepSpeedEngine))
