"""DeBERTa of both versions: schemes beside its relative part, and in its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import hf_posswap
from hf_posswap import patch_model, plan_swap, swap_plan, unpatch_model, verify_swap
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families import locate
from hf_posswap.testing.tiny import tiny_model
from tests.families.interface_models import CASES, words
from tests.families.oracles import penalty, turn, without_tables

KINDS = ("deberta", "deberta-v2", "deberta-v3")
IDS = words(2, 12)
NOISE = 5e-5
HEADS = 4


def build(kind: str, **changes: Any) -> Any:
    return CASES[kind].build(**changes)


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


def same(a: Tensor, b: Tensor, noise: float = NOISE) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=noise)


def by_tokens(x: Tensor) -> Tensor:
    """Return q or k, [B, H, Q, D] or [B H, Q, D], as [B, Q, H D]."""
    return x.reshape(-1, HEADS, *x.shape[-2:]).transpose(1, 2).flatten(2)


def turned(query: Tensor, key: Tensor) -> Tensor:
    """Return what RoPE adds to the scores of q and k, [B, H, Q, K]."""
    pair = [by_tokens(x) for x in (query, key)]
    found = []
    for q, k in (pair, [turn(HEADS)(None, None, x) for x in pair]):
        heads = [x.unflatten(-1, (HEADS, -1)) for x in (q, k)]
        found.append(torch.einsum("bqhd,bkhd->bhqk", *heads))
    return found[1] - found[0]


def sloped(query: Tensor, key: Tensor) -> Tensor:
    """Return what ALiBi adds to scores, [1, H, Q, K]."""
    return penalty(HEADS, query.shape[-2], causal=False)


def oracle(kind: str, extra: Callable[[Tensor, Tensor], Tensor], *, keep: bool) -> Any:
    """Return a stock model without its table, to whose scores the relative part's own method adds `extra`."""
    model = build(kind)
    if kind != "deberta-v3":
        without_tables(model)
    for path in locate(model).attention:
        module = model.get_submodule(path)
        name = "disentangled_att_bias" if kind == "deberta" else "disentangled_attention_bias"
        native = getattr(module, name)

        def added(query: Tensor, key: Tensor, *rest: Any, native: Any = native) -> Tensor:
            scale = 1.0 if kind == "deberta" else (query.shape[-1] * rest[-1]) ** -0.5  # v1 has it in q
            by_key = extra(query, key) * (scale if extra is turned else 1.0)
            relative = native(query, key, *rest)
            return by_key.expand(len(IDS), -1, -1, -1).reshape(relative.shape) + (relative if keep else 0)

        setattr(module, name, added)
    return model


@pytest.mark.parametrize("relative", ["keep", "drop"])
@pytest.mark.parametrize(("scheme", "extra"), [("rope", turned), ("alibi", sloped)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_scheme_beside_the_relative_part_or_in_its_place(kind: str, scheme: str, extra: Any, relative: Any) -> None:
    expected = logits(oracle(kind, extra, keep=relative == "keep"))
    model = build(kind)
    assert (logits(model) - expected).abs().max() > 0.1
    plan = swap_plan(patch_model(model, scheme, relative=relative))
    same(logits(model), expected)
    verify_swap(model)
    assert plan.record.relative == relative
    assert ('relative="drop" removes them' in str(plan)) is (relative == "keep")
    assert ("encoder.relative_attention" in str(plan)) is (relative == "drop")


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_word_the_relative_part_stays(kind: str) -> None:
    silent, said = build(kind), build(kind)
    assert swap_plan(patch_model(silent, "rope")).record == swap_plan(patch_model(said, "rope", relative="keep")).record
    assert torch.equal(logits(silent), logits(said))


@pytest.mark.parametrize("scheme", ["learned", "sinusoidal"])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_table_alone_is_a_stock_model(kind: str, scheme: str, tmp_path: Path) -> None:
    model = build(kind)
    plan = swap_plan(patch_model(model, scheme, relative="drop"))
    assert plan.route == "native"
    verify_swap(model)
    hf_posswap.save(model, tmp_path)
    stock, info = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert stock.config.relative_attention is False
    assert torch.equal(logits(stock.eval()), logits(model))
    left_out = {name for name in build(kind).state_dict() if name not in stock.state_dict()}
    assert {name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2] for name in left_out} <= {
        "rel_embeddings", "pos_proj", "pos_q_proj", "pos_key_proj", "pos_query_proj"}  # fmt: skip
    assert set(plan.unused) == left_out
    loaded = hf_posswap.load(tmp_path)
    verify_swap(loaded)
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("relative", ["keep", "drop"])
@pytest.mark.parametrize("kind", KINDS)
def test_taken_back_and_loaded(kind: str, relative: Any, tmp_path: Path) -> None:
    model = build(kind)
    before, state, config = logits(model), model.state_dict(), model.config.to_dict()
    patch_model(model, "rope", relative=relative, max_length=64)
    longer = words(2, 60)
    hf_posswap.save(model, tmp_path)
    loaded = hf_posswap.load(tmp_path)
    assert torch.equal(logits(loaded, longer), logits(model, longer))
    assert loaded.config.posswap["relative"] == relative
    unpatch_model(model)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.config.to_dict() == config
    assert torch.equal(logits(model), before)


def test_what_was_left_out_is_cast_with_the_model() -> None:
    model, cast = build("deberta"), build("deberta").to(torch.bfloat16)
    patch_model(model, "rope", relative="drop")
    model.to(torch.bfloat16)
    unpatch_model(model)
    assert torch.equal(logits(model), logits(cast))


@pytest.mark.parametrize(
    ("model", "relative", "says"),
    [
        ("LlamaForCausalLM", "keep", r"relative='keep' is for models with relative positions .* \(DeBERTa, DeBERTa-v2"),
        ("BertForMaskedLM", "drop", "BertForMaskedLM has none. Leave it out."),
        ("T5ForConditionalGeneration", "drop", "T5ForConditionalGeneration has none"),
        ("DebertaForMaskedLM", "drop", "DebertaForMaskedLM has none"),  # its config says no relative_attention
        ("BertForMaskedLM", "gone", "relative must be 'keep' or 'drop', got 'gone'"),
    ],
)
def test_other_models_refuse_the_option_by_name(model: str, relative: Any, says: str) -> None:
    with pytest.raises(UnsupportedSwapError, match=says):
        plan_swap(tiny_model(model), "rope", relative=relative)


def test_heads_that_mix_their_scores_are_refused() -> None:
    model = build("deberta", talking_head=True)
    with pytest.raises(
        UnsupportedSwapError, match="talking_head=True: its heads mix their scores.*sinusoidal, learned"
    ):
        patch_model(model, "rope")
    patch_model(model, "sinusoidal")
    verify_swap(model)
