"""What is to train does, and nothing else moves by a bit; tied weights stay tied, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_posswap
from hf_posswap import patch_model
from hf_posswap.errors import ConfigError, TrainingError
from hf_posswap.training.trainable import (
    WHATS,
    TrainableSettings,
    base_name,
    embedding_path,
    linear_layers,
    norm_paths,
    parameter_groups,
    position_names,
    prepare_trainable,
)
from tests.training.tiny_models import VOCABULARY, WINDOW, tiny

IDS = torch.randint(0, VOCABULARY, (2, 2 * WINDOW), generator=torch.Generator().manual_seed(0))


def swapped(kind: str, scheme: str, **options: Any) -> Any:
    model = tiny(kind, **options)
    patch_model(model, scheme, max_length=2 * WINDOW)
    return model


def trained(
    model: Any, settings: TrainableSettings, steps: int = 3, peft: dict[str, Any] | None = None
) -> tuple[Any, set[str]]:
    """Return the prepared model after some steps of AdamW, and the names of the parameters that moved."""
    model = prepare_trainable(model, settings, peft)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = parameter_groups(model, settings, learning_rate=1e-2, weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups)
    for _ in range(steps):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved <= {name for name, p in model.named_parameters() if p.requires_grad}
    return model, moved


def test_full_trains_every_parameter() -> None:
    model, moved = trained(swapped("gpt2", "kerple"), TrainableSettings())
    assert moved == {name for name, _ in model.named_parameters()}


def test_what_the_swap_froze_stays_frozen() -> None:
    model, moved = trained(swapped("gpt2", "sinusoidal"), TrainableSettings())
    assert {name for name, _ in model.named_parameters()} - moved == {"transformer.wpe.weight"}


@pytest.mark.parametrize(
    ("kind", "scheme", "wanted"),
    [("gpt2", "kerple", "transformer.posswap."), ("llama", "fire", "model.posswap."),
     ("gpt2", "alibi:learned=true", "transformer.posswap."),
     ("gpt2", "learned", "transformer.wpe."), ("bert", "t5", "bert.posswap."),
     ("gpt2", "learned + rope", "transformer.wpe."), ("gpt2", "sinusoidal + kerple", "transformer.posswap.")],
)  # fmt: skip
def test_positions_trains_the_positions_alone(kind: str, scheme: str, wanted: str) -> None:
    model, moved = trained(swapped(kind, scheme), TrainableSettings("positions"))
    assert moved
    assert all(name.startswith(wanted) for name in moved)
    assert moved == set(position_names(model))


def test_a_new_table_is_trained_with_what_stands_beside_it() -> None:
    model, moved = trained(swapped("gpt2", "learned:extend=reinit + kerple"), TrainableSettings("positions"))
    assert moved == {"transformer.wpe.old", "transformer.posswap.raw_r1", "transformer.posswap.raw_r2"}


def test_positions_with_embeddings_and_norms() -> None:
    model, moved = trained(swapped("gpt2", "kerple"), TrainableSettings("positions", embeddings=True, norms=True))
    norms = {f"{path}.{leaf}" for path in norm_paths(model) for leaf in ("weight", "bias")}
    assert moved == {"transformer.wte.weight", *position_names(model), *norms}
    assert len(norms) == 10


@pytest.mark.parametrize(
    ("kind", "projections"), [("llama", ["q_proj", "k_proj"]), ("gpt2", ["c_attn"]), ("bert", ["query", "key"])]
)
def test_norms_and_queries_and_keys(kind: str, projections: list[str]) -> None:
    model = swapped(kind, "rope")
    norms = {id(m) for m in model.modules() if isinstance(m, nn.LayerNorm) or "RMSNorm" in type(m).__name__}
    own = {id(m) for path, m in model.named_modules() if path.rpartition(".")[2] in projections}
    wanted = {f"{path}.{leaf}" for path, m in model.named_modules() if id(m) in norms | own
              for leaf, _ in m.named_parameters()}  # fmt: skip
    prepared = prepare_trainable(model, TrainableSettings("norms_qk"))
    assert {name for name, p in prepared.named_parameters() if p.requires_grad} == wanted


@pytest.mark.parametrize("scheme", ["learned", "learned + rope"])
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_old_rows_stay_bit_for_bit(kind: str, scheme: str) -> None:
    model = swapped(kind, scheme)
    name = next(name for name, _ in model.named_parameters() if "wpe" in name or "position_embeddings" in name)
    old = model.get_parameter(name).detach().clone()
    model, moved = trained(model, TrainableSettings("new_rows"), steps=5)
    new = model.get_parameter(name).detach()
    assert moved == {name}
    assert torch.equal(new[:WINDOW], old[:WINDOW])
    assert (new[WINDOW:-1] != old[WINDOW:-1]).any(dim=1).all()  # of a causal model's last token nothing is asked


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("how", [{}, {"use_dora": True}, {"use_rslora": True}], ids=["lora", "dora", "rslora"])
@pytest.mark.parametrize(
    ("kind", "target", "count"), [("gpt2", None, 4), ("gpt2", "all-linear", 8), ("llama", "all-linear", 14)]
)
def test_adapters_train_their_weights_and_the_positions_alone(
    tmp_path: Path, how: dict[str, Any], kind: str, target: Any, count: int
) -> None:
    base = swapped(kind, "kerple")
    base.save_pretrained(tmp_path / "base")
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": target, **how}
    model, moved = trained(base, TrainableSettings(), peft=fields)
    adapters = {name for name in moved if "lora_B" in name}
    assert len(adapters) == count
    assert all("lora" in name or "posswap" in name for name in moved)
    assert {base_name(name) for name in moved if "posswap" in name} == {
        base_name(name) for name in position_names(base)
    }
    model.eval().save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "posswap.json").is_file()
    again = hf_posswap.load_adapter(hf_posswap.load(tmp_path / "base"), tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=IDS).logits, model(input_ids=IDS).logits)
    config = model.peft_config["default"]
    assert (config.use_dora, config.use_rslora) == ("use_dora" in how, "use_rslora" in how)
    assert (config.r, config.lora_alpha) == (2, 4)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_adapters_with_embeddings_and_norms_stay_tied(tmp_path: Path, kind: str) -> None:
    base = swapped(kind, "kerple", **{"tie_word_embeddings": True})
    base.save_pretrained(tmp_path / "base")
    model, moved = trained(base, TrainableSettings(embeddings=True, norms=True), peft={"peft_type": "LORA"})
    inner = model.get_base_model()
    table, head = inner.get_input_embeddings(), inner.get_output_embeddings()
    assert table.modules_to_save["default"].weight is head.modules_to_save["default"].weight
    assert {base_name(name) for name in moved} >= {f"{embedding_path(inner)}.weight"}
    assert any("norm" in name or "ln_" in name for name in moved)
    model.eval().save_pretrained(tmp_path / "adapter")
    again = hf_posswap.load_adapter(hf_posswap.load(tmp_path / "base"), tmp_path / "adapter").eval()
    parts = again.get_base_model().get_input_embeddings(), again.get_base_model().get_output_embeddings()
    assert parts[0].modules_to_save["default"].weight is parts[1].modules_to_save["default"].weight
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=IDS).logits, model(input_ids=IDS).logits)
        merged = model.merge_and_unload()
        torch.testing.assert_close(again(input_ids=IDS).logits, merged(input_ids=IDS).logits, atol=1e-4, rtol=1e-4)
    assert merged.get_input_embeddings().weight is merged.get_output_embeddings().weight


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_on_a_model_without_a_swap() -> None:
    _, moved = trained(
        tiny("llama", max_position_embeddings=2 * WINDOW), TrainableSettings(), peft={"peft_type": "LORA"}
    )
    assert len(moved) == 16
    assert all("lora" in name for name in moved)


@pytest.mark.parametrize("settings", [TrainableSettings(), TrainableSettings("positions", embeddings=True)])
def test_tied_weights_stay_tied_through_training_and_saving(tmp_path: Path, settings: TrainableSettings) -> None:
    model, moved = trained(swapped("gpt2", "kerple"), settings)
    assert "transformer.wte.weight" in moved
    assert model.transformer.wte.weight is model.lm_head.weight
    hf_posswap.save(model.eval(), tmp_path)
    again = hf_posswap.load(tmp_path)
    assert again.transformer.wte.weight is again.lm_head.weight
    with torch.no_grad():
        assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_groups_hold_each_parameter_once_and_vectors_do_not_decay() -> None:
    model = swapped("gpt2", "kerple")
    groups = parameter_groups(model, TrainableSettings(), learning_rate=1.0, weight_decay=0.5)
    held = [p for group in groups for p in group["params"]]
    assert len({id(p) for p in held}) == len(held) == sum(1 for _ in model.parameters())
    for group in groups:
        assert all((p.ndim >= 2) == (group["weight_decay"] > 0) for p in group["params"])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("what", ["full", "lora"])
def test_rates_by_layer_and_for_positions(what: Any) -> None:
    settings = TrainableSettings(positions_rate=10.0, layer_decay=0.5)
    model = prepare_trainable(swapped("gpt2", "kerple"), settings, None if what == "full" else {"peft_type": "LORA"})
    wrapped = nn.parallel.DataParallel(model)  # names begin with "module."
    groups = parameter_groups(wrapped, settings, learning_rate=1.0, weight_decay=0.0)
    rate = {id(p): group["lr"] for group in groups for p in group["params"]}
    expected = {"wte": 0.25, "h.0": 0.5, "h.1": 1.0, "ln_f": 1.0, "posswap": 10.0}
    seen = set()
    for name, p in model.named_parameters():
        if p.requires_grad:
            part = next(part for part in expected if part in name)
            assert rate[id(p)] == expected[part], name
            seen.add(part)
    assert seen == (set(expected) if what == "full" else {"h.0", "h.1", "posswap"})


def test_adapters_go_to_the_projections_of_attention_where_nothing_is_said() -> None:
    assert linear_layers(tiny("llama")) == [f"self_attn.{p}_proj" for p in "koqv"]
    assert linear_layers(tiny("bert")) == [f"attention.self.{p}" for p in ("key", "query", "value")]


@pytest.mark.parametrize(
    ("scheme", "what", "message"),
    [
        ("rope", "positions", "GPT2LMHeadModel has no parameters that a swap added: swap to a scheme with parameters"),
        ("rope", "new_rows", r"GPT2LMHeadModel was swapped to rope.*: no table has new rows"),
        (None, "new_rows", "GPT2LMHeadModel carries no swap: no table has new rows"),
        ("interpolated", "new_rows", r"also changed the old rows: swap with extend one of tile, hierarch"),
    ],
)  # fmt: skip
def test_what_a_model_does_not_have_is_refused_before_it_is_touched(scheme: Any, what: Any, message: str) -> None:
    model = tiny("gpt2")
    if scheme is not None:
        more = {"extend": "interpolate"} if scheme == "interpolated" else {}
        patch_model(model, "learned" if more else scheme, max_length=2 * WINDOW, **more)
    with pytest.raises(ConfigError, match=message):
        prepare_trainable(model, TrainableSettings(what))
    assert all(p.requires_grad for p in model.parameters())


def test_tied_embeddings_that_peft_would_untie_are_refused() -> None:
    model = swapped("bert", "rope")
    with pytest.raises(ConfigError, match=r"word_embeddings and cls.predictions.decoder of BertForMaskedLM are tied"):
        prepare_trainable(model, TrainableSettings(embeddings=True), {"peft_type": "LORA"})
    assert not hasattr(model, "peft_config")


def test_unknown_projections_and_frozen_models_are_refused() -> None:
    model = tiny("llama")
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj"):
            setattr(layer.self_attn, f"my_{name}", layer.self_attn._modules.pop(name))
    with pytest.raises(ConfigError, match=r"which of my_k_proj, my_q_proj, o_proj, v_proj in model.layers.0.self_attn"):
        prepare_trainable(model, TrainableSettings("norms_qk"))
    with pytest.raises(ConfigError, match="no parameter of LlamaForCausalLM is trainable"):
        parameter_groups(model.requires_grad_(False), TrainableSettings(), learning_rate=1.0, weight_decay=0.0)


def test_a_sharded_table_whose_old_rows_would_move_is_refused() -> None:
    settings = TrainableSettings("new_rows")
    model = prepare_trainable(swapped("gpt2", "learned"), settings)
    model.transformer.wpe.weight = nn.Parameter(model.transformer.wpe.weight.detach())  # as sharding does
    with pytest.raises(TrainingError, match=r"transformer.wpe.weight was replaced .*DDP, or train 'positions'"):
        parameter_groups(model, settings, learning_rate=1.0, weight_decay=0.0)


def test_every_problem_of_settings_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"what is one of full.*'half'; positions_rate .*; layer_decay"):
        TrainableSettings("half", positions_rate=0.0, layer_decay=2.0)  # type: ignore[arg-type]
    assert set(WHATS) == {"full", "positions", "norms_qk", "new_rows"}
