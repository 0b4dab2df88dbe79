"""A swapped model is of a class of its own: every road that transformers has to a model leads to a swapped one."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, GPT2LMHeadModel, LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_posswap
from hf_posswap import patch_model, swap_plan, unpatch_model
from hf_posswap.errors import RecordError, UnsupportedSwapError
from hf_posswap.patching.record.model_class import native_class, swapped_class
from hf_posswap.testing.tiny import tiny_model
from tests.checkpoints.fresh import PROJECT
from tests.contract.models import LENGTH
from tests.contract.pairs import Pair, words
from tests.families import vision_models

PAIRS = (
    Pair("llama", "alibi"),
    Pair("llama", "kerple"),
    Pair("gpt2", "rope"),
    Pair("gpt2", "fire"),
    Pair("gpt2", "blend"),
    Pair("bert", "t5"),
    Pair("roberta", "alibi"),
    Pair("bloom", "rope"),
    Pair("falcon", "alibi"),
    Pair("mpt", "rope"),
    Pair("gpt_neo", "self_extend"),
    Pair("gptj", "alibi"),
    Pair("bart", "rope", stack="decoder"),
    Pair("t5", "rope", stack="decoder"),
)
IDS = words(2, LENGTH - 4)


def trained(pair: Pair) -> Any:
    """Return a swapped model whose learned positions are not what they begin with."""
    model = pair.swapped()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in pair.plan.added:
                parameter.add_(torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_swapped_model_is_of_a_subclass_and_unpatching_gives_its_own_class_back(pair: Pair) -> None:
    model = pair.native()
    classes = type(model), type(model.base_model)
    pair.patch(model)
    for swapped, native in zip((model, model.base_model), classes, strict=True):
        assert type(swapped) is swapped_class(native) is not native
        assert isinstance(swapped, native)
        assert native_class(type(swapped)) is native
        assert type(swapped).__name__ == native.__name__  # which trainers, losses and pipelines go by
        assert type(swapped).__module__ == native.__module__
        assert type(swapped).__qualname__ == f"Posswap{native.__name__}"
        assert swapped.can_generate() == native.can_generate()
    unpatch_model(model)
    assert (type(model), type(model.base_model)) == classes
    assert "_posswap_marked" not in {**vars(model), **vars(model.base_model)}


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_swapped_model_returns_the_hidden_states_and_attentions_that_its_stock_class_returns(pair: Pair) -> None:
    stock, model = pair.native(), pair.swapped()
    seen = []
    for one in (stock, model):
        one.set_attn_implementation("eager")
        more = {"decoder_input_ids": IDS} if one.config.is_encoder_decoder else {}
        with torch.no_grad():
            seen.append(one(IDS, output_hidden_states=True, output_attentions=True, **more))
    names = [name for name in seen[0] if name.endswith(("hidden_states", "attentions"))]
    assert names
    for name in names:
        assert [one.shape for one in seen[1][name]] == [one.shape for one in seen[0][name]], name


def test_a_native_swap_leaves_the_class_as_it_is() -> None:
    assert type(Pair("gpt2", "nope").swapped()) is GPT2LMHeadModel
    assert type(Pair("llama", "yarn").swapped()) is LlamaForCausalLM


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_clone_of_class_config_and_weights_is_equal(pair: Pair) -> None:
    model = trained(pair)
    expected = pair.logits(model, IDS)
    clone = type(model)(model.config).eval()
    clone.load_state_dict(model.state_dict())
    assert type(clone) is type(model)
    assert torch.equal(pair.logits(clone, IDS), expected)
    assert clone.config.posswap == model.config.posswap
    clone.base_model.load_state_dict(model.base_model.state_dict())


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_copies_and_pickles_are_equal_and_of_the_same_class(pair: Pair, tmp_path: Path) -> None:
    model = trained(pair)
    expected = pair.logits(model, IDS)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for again in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert type(again) is type(model)
        assert torch.equal(pair.logits(again, IDS), expected)


def test_a_native_swap_is_cloned_by_its_stock_class() -> None:
    for pair in (Pair("gpt2", "nope"), Pair("gpt2", "sinusoidal"), Pair("llama", "yarn")):
        model = pair.swapped()
        clone = type(model)(model.config).eval()
        clone.load_state_dict(model.state_dict())
        assert torch.equal(pair.logits(clone, IDS), pair.logits(model, IDS))


@pytest.mark.parametrize("scheme", ["rope_2d", "alibi_2d"])
@pytest.mark.parametrize("name", [*vision_models.FIRST, "CLIPModel"])
def test_a_model_that_sees_images_is_cloned_with_its_swap(name: str, scheme: str) -> None:
    model = vision_models.build(name)
    patch_model(model, scheme)
    clone = type(model)(model.config).eval()
    clone.load_state_dict(model.state_dict())
    assert type(clone) is type(model) is not native_class(type(model))
    pixels = vision_models.images()
    assert torch.equal(vision_models.states(clone, pixels), vision_models.states(model, pixels))


def in_a_fresh_process(code: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(PROJECT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


FROM_CONFIG = """
import torch, hf_posswap
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, hidden_size=8, intermediate_size=8, vocab_size=11)
model = LlamaForCausalLM(config).eval()
hf_posswap.patch_model(model, "alibi")
clone = AutoModelForCausalLM.from_config(model.config).eval()
clone.load_state_dict(model.state_dict())
ids = torch.arange(10)[None]
print(type(clone) is type(model), torch.equal(clone(ids).logits, model(ids).logits))
"""
UNPICKLED = """
import pickle, sys, hf_posswap
from transformers import AutoModelForCausalLM
config = pickle.load(open(sys.argv[1], "rb")) if len(sys.argv) > 1 else pickle.load(open({path!r}, "rb"))
print(AutoModelForCausalLM.from_config(config).config.posswap["scheme"]["name"])
"""
BY_NAME = """
import hf_posswap, transformers
config = transformers.AutoConfig.from_pretrained({path!r})
model = getattr(transformers, config.architectures[0]).from_pretrained({path!r})
print(config.architectures[0], type(model).__name__, model.config.posswap["scheme"]["name"])
"""


@pytest.mark.slow
def test_a_config_makes_a_swapped_model_whatever_was_loaded_before(tmp_path: Path) -> None:
    assert in_a_fresh_process(FROM_CONFIG) == "True True"
    path = tmp_path / "config.pkl"
    path.write_bytes(pickle.dumps(Pair("llama", "alibi").swapped().config))
    assert in_a_fresh_process(UNPICKLED.format(path=str(path))) == "alibi"


@pytest.mark.slow
def test_a_class_found_by_its_architecture_loads_the_folder_as_trl_does(tmp_path: Path) -> None:
    Pair("llama", "alibi").swapped().save_pretrained(tmp_path)
    said = in_a_fresh_process(BY_NAME.format(path=str(tmp_path)))
    assert said == "PosswapLlamaForCausalLM LlamaForCausalLM alibi"


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_every_way_to_load_a_folder_gives_the_same_model(pair: Pair, tmp_path: Path) -> None:
    model = trained(pair)
    expected = pair.logits(model, IDS)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    named = getattr(transformers, config.architectures[0])
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == config.architectures
    assert config.architectures == [f"Posswap{pair.tiny.model_class}"]
    ways = [
        hf_posswap.load(tmp_path),
        named.from_pretrained(tmp_path),
        named.from_pretrained(tmp_path, config=config),
        named.from_pretrained(tmp_path, ignore_mismatched_sizes=True),
        type(model).from_pretrained(tmp_path),
    ]
    for loaded in ways:
        assert type(loaded) is type(model)
        assert torch.equal(pair.logits(loaded, IDS), expected)


def test_a_swapped_class_refuses_what_carries_no_swap(tmp_path: Path) -> None:
    cls = type(Pair("llama", "alibi").swapped())
    stock = Pair("llama", "alibi").native()
    stock.save_pretrained(tmp_path)
    wrong = "PosswapLlamaForCausalLM is the class of swapped models, and this .* carries no swap.*use LlamaForCausalLM"
    for road in (lambda: cls(stock.config), lambda: cls.from_pretrained(tmp_path)):
        with pytest.raises(RecordError, match=wrong):
            road()
    Pair("llama", "alibi").swapped().save_pretrained(tmp_path / "swapped")
    with pytest.raises(RecordError, match=wrong):
        cls.from_pretrained(tmp_path / "swapped", config=stock.config)


def test_a_base_model_taken_out_of_a_swapped_one_is_saved_and_loaded_swapped(tmp_path: Path) -> None:
    model = trained(Pair("bert", "t5"))
    with torch.no_grad():
        expected = model.base_model(IDS).last_hidden_state
        model.base_model.save_pretrained(tmp_path)
        loaded = transformers.AutoModel.from_pretrained(tmp_path)
        assert type(loaded) is type(model.base_model)
        assert torch.equal(loaded(IDS).last_hidden_state, expected)


def test_the_name_is_one_that_a_trainer_shifts_labels_for_and_a_pipeline_takes() -> None:
    model = Pair("llama", "alibi").swapped()
    assert model._get_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    assert model.loss_type == Pair("llama", "alibi").native().loss_type == type(model)(model.config).loss_type


class PatchesItself(GPT2LMHeadModel):
    built = 0

    def __init__(self, config: Any) -> None:
        type(self).built += 1
        super().__init__(config)
        self.extra = nn.Linear(2, 2)
        self.plan = swap_plan(patch_model(self, "rope", max_length=2 * LENGTH))


ITSELF = Pair("gpt2", "rope")


def test_a_class_that_patches_itself_is_built_as_often_as_a_plan_looks_at_a_fresh_model() -> None:
    PatchesItself.built = 0
    model: Any = PatchesItself(ITSELF.tiny.config()).eval()
    assert PatchesItself.built == 3  # itself, and what it is compared with: of the new length, and of its own
    assert isinstance(model, PatchesItself)
    assert model.plan.scheme.name == "rope"
    clone = type(model)(model.config).eval()
    clone.load_state_dict(model.state_dict())
    ids = words(1, LENGTH + 8)
    assert torch.equal(ITSELF.logits(clone, ids), ITSELF.logits(model, ids))
    model.config.posswap["scheme"]["base"] = 500.0
    with pytest.raises(RecordError, match="puts a swap into itself as it is built, to rope"):
        type(model)(model.config)


class LlamaPatchesItself(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        patch_model(self, "alibi")


def test_a_class_that_patches_itself_loads_its_base_and_is_loaded_with_its_swap(tmp_path: Path) -> None:
    pair, ids = Pair("llama", "alibi"), words(1, LENGTH + 8)
    pair.native().save_pretrained(tmp_path / "base")
    model = LlamaPatchesItself.from_pretrained(tmp_path / "base")
    assert torch.equal(pair.logits(model, ids), pair.logits(pair.swapped(), ids))
    model.save_pretrained(tmp_path / "swapped")
    loaded = hf_posswap.load(tmp_path / "swapped", model_class=LlamaPatchesItself)
    assert type(loaded) is type(model)
    assert torch.equal(pair.logits(loaded, ids), pair.logits(model, ids))
    with pytest.raises(ValueError, match="pip install hf-posswap"):
        LlamaPatchesItself.from_pretrained(tmp_path / "swapped")


def test_a_reference_made_from_a_swapped_model_in_memory_is_swapped_as_well() -> None:
    model = Pair("llama", "alibi").swapped()
    assert torch.equal(
        Pair("llama", "alibi").logits(copy.deepcopy(model), IDS), Pair("llama", "alibi").logits(model, IDS)
    )


def test_the_same_object_is_pickled_twice_in_one_stream() -> None:
    model = Pair("gpt2", "rope").swapped()
    stream = io.BytesIO()
    pickle.dump([model, model.base_model], stream)
    stream.seek(0)
    whole, base = pickle.load(stream)
    assert whole.base_model is base


def test_a_decoder_alone_is_no_encoder_decoder_and_the_reason_is_said(tmp_path: Path) -> None:
    sizes = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8, "vocab_size": 32}
    config = transformers.BartConfig(**sizes, max_position_embeddings=16, pad_token_id=1)
    model = patch_model(transformers.BartForCausalLM(config), "rope", max_length=64).eval()
    model.save_pretrained(tmp_path)
    for auto in (transformers.AutoModel, transformers.AutoModelForSeq2SeqLM):
        with pytest.raises(UnsupportedSwapError, match="encoder and a decoder, .* false, like that of BartForCausalLM"):
            auto.from_pretrained(tmp_path)
    for loaded in (transformers.AutoModelForCausalLM.from_pretrained(tmp_path), hf_posswap.load(tmp_path)):
        ids = torch.arange(3, 30)[None]
        assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)


@pytest.mark.parametrize("scheme", ["alibi", "fire", "native + ssmax", "rope", "self_extend"])
def test_tensor_parallelism_is_refused_where_heads_differ(scheme: str) -> None:
    """As `from_pretrained(tp_plan="auto")` leaves it: each process has some of the heads."""
    model: Any = hf_posswap.patch_model(tiny_model("llama", meta=False), scheme, site="attention", max_length=64)
    type(model).posswap_loaded(model)
    model._tp_size = 2
    if scheme in ("rope", "self_extend"):
        type(model).posswap_loaded(model)
        return
    with pytest.raises(UnsupportedSwapError, match=r"for each attention head .* What works: FSDP2, DDP or device_map"):
        type(model).posswap_loaded(model)
