"""Models whose table alone is swapped: against stock models whose table was written by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_posswap import load, patch_model, plan_swap, swap_plan, unpatch_model, verify_swap
from hf_posswap.errors import PositionRangeError, SchemeError, UnsupportedSwapError
from hf_posswap.families import locate
from hf_posswap.testing.tiny import TINY_LENGTH, tiny_model

KINDS: dict[str, dict[str, Any]] = {
    "XLMWithLMHeadModel": {},
    "FlaubertWithLMHeadModel": {},
    "LongformerForMaskedLM": {"attention_window": 8},
    "TapasForMaskedLM": {},
    "LEDForConditionalGeneration": {"attention_window": 8},
}
"""Classes, with what their config has."""
LONGER = 2 * TINY_LENGTH
IDS = torch.randint(5, 90, (2, 20), generator=torch.Generator().manual_seed(0))
LONG_IDS = torch.randint(5, 90, (2, LONGER - 3), generator=torch.Generator().manual_seed(1))


def tiny(kind: str, **changes: Any) -> Any:
    return tiny_model(kind, meta=False, **KINDS[kind] | changes)


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    decoder = {"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=ids, **decoder).logits


def sinusoids(rows: int, width: int) -> Tensor:
    """Return the table of section 3.5 of https://arxiv.org/abs/1706.03762, a column at a time, [rows, width]."""
    places, table = np.arange(rows, dtype=np.float64), np.zeros((rows, width))
    for pair in range(width // 2):
        angles = places / 10000.0 ** (2 * pair / width)
        table[:, 2 * pair], table[:, 2 * pair + 1] = np.sin(angles), np.cos(angles)
    return torch.tensor(table, dtype=torch.float32)


def by_hand(model: Any, rows_of: Any, length: int = TINY_LENGTH) -> Any:
    """Return a stock model of `length`: the weights of `model`, and in its tables what `rows_of` makes of the rows."""
    sites, config = locate(model), copy.deepcopy(model.config)
    state = dict(model.state_dict())
    for stack in sites.stacks:
        assert stack.table_path is not None
        assert stack.config_name is not None
        old, offset = state[f"{stack.table_path}.weight"], stack.table_offset
        state[f"{stack.table_path}.weight"] = torch.cat((old[:offset], rows_of(old[offset:])))
        setattr(config, stack.config_name, stack.config_length(length))
    stock = type(model)(config).eval()
    stock.load_state_dict(state)
    return stock


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_re_applied_is_the_model_itself(kind: str) -> None:
    model, before = tiny(kind), logits(tiny(kind))
    plan = swap_plan(patch_model(model, "learned"))
    assert plan.route == "native"
    assert torch.equal(logits(model), before)
    unpatch_model(model)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("kind", KINDS)
def test_sinusoids_are_those_of_a_stock_model_that_holds_them(kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    plan = swap_plan(patch_model(model, "sinusoidal"))
    assert plan.adaptation.endswith("every position vector changes")
    verify_swap(model)
    held = kept_rows(model)[-1]
    formula = sinusoids(*held.shape)
    scale = float(held.norm() / formula.norm())  # the scheme fits its size to the table that was there
    torch.testing.assert_close(sorted_columns(held / scale), sorted_columns(formula), atol=1e-4, rtol=0)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path).eval()), logits(model))


def sorted_columns(table: Tensor) -> Tensor:
    """Return the columns of a table in an order of their own: sines and cosines lie side by side, or in halves."""
    return table[:, np.lexsort(table.round(decimals=3).numpy())]


@pytest.mark.parametrize("kind", KINDS)
def test_a_longer_table_is_a_longer_stock_model(kind: str, tmp_path: Path) -> None:
    model, native = tiny(kind), tiny(kind)
    patch_model(model, "learned", max_length=LONGER)
    grown = kept_rows(model)
    assert {len(rows) for rows in grown} == {LONGER}
    tables = iter(grown)
    stock = by_hand(native, lambda _: next(tables), LONGER)
    assert torch.equal(logits(model, LONG_IDS), logits(stock, LONG_IDS))
    for rows, old in zip(grown, kept_rows(native), strict=True):
        assert torch.equal(rows[: len(old)], old)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path), LONG_IDS), logits(model, LONG_IDS))
    assert torch.equal(logits(type(model).from_pretrained(tmp_path).eval(), LONG_IDS), logits(model, LONG_IDS))
    with pytest.raises(PositionRangeError, match=f"ends at {LONGER}"):
        logits(model, torch.cat((LONG_IDS, LONG_IDS), dim=1))


def kept_rows(model: Any) -> list[Tensor]:
    """Return the rows of each table from position 0 on."""
    stacks = locate(model).stacks
    return [model.get_submodule(stack.table_path).weight.detach()[stack.table_offset :].clone() for stack in stacks]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["rope", "alibi"])
def test_nothing_is_put_inside_attention(kind: str, scheme: str) -> None:
    with pytest.raises(UnsupportedSwapError, match=r"AttentionInterface.*What works: sinusoidal, learned"):
        plan_swap(tiny_model(kind, **KINDS[kind]), scheme)


def test_a_causal_xlm_goes_without_positions() -> None:
    model, before = tiny("XLMWithLMHeadModel", causal=True), logits(tiny("XLMWithLMHeadModel", causal=True))
    assert swap_plan(patch_model(model, "nope")).route == "native"
    verify_swap(model)
    stock = by_hand(tiny("XLMWithLMHeadModel", causal=True), torch.zeros_like)
    torch.testing.assert_close(logits(model), logits(stock), atol=1e-5, rtol=0)
    assert float((logits(model) - before).abs().max()) > 0.1


def test_mobilebert_attends_with_heads_narrower_than_its_states() -> None:
    model = tiny_model("MobileBertForMaskedLM")
    geometry, config = locate(model).geometry, model.config
    assert (geometry.hidden_size, geometry.head_dim) == (config.hidden_size, config.true_hidden_size // 4)
    assert geometry.head_dim != geometry.hidden_size // geometry.num_heads


def test_layoutlm_keeps_its_places_on_the_page() -> None:
    model = tiny_model("LayoutLMForMaskedLM", meta=False)
    boxes = torch.randint(0, 400, (2, 20, 2), generator=torch.Generator().manual_seed(2))
    boxes = torch.cat((boxes, boxes + 100), -1)  # left, upper, right, lower
    plan = swap_plan(patch_model(model, "rope"))
    assert "Places on the page (bbox) keep their tables." in plan.notes
    with torch.no_grad():
        here, elsewhere = (model(input_ids=IDS, bbox=box).logits for box in (boxes, boxes.flip(1)))
    assert float((here - elsewhere).abs().max()) > 0.1
    tables = [name for name, _ in model.named_parameters() if "_position_embeddings" in name]
    assert len(tables) == 4


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("LEDForConditionalGeneration", {"attention_window": 8}),
        ("BigBirdForMaskedLM", {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}),
    ],
)
def test_a_table_ends_where_the_model_stops_padding_its_texts(kind: str, changes: dict[str, Any]) -> None:
    """LED's encoder and BigBird's blocks pad a text before they read the table: rows must be there for the padding."""
    model, length = tiny_model(kind, meta=False, **changes), 5 * TINY_LENGTH
    with pytest.raises(SchemeError, match=rf"to a multiple of \d tokens, .*max_length={length - 2}\. Give {length}\."):
        patch_model(model, "sinusoidal", max_length=length - 2)
    patch_model(model, "sinusoidal", max_length=length)
    ids = torch.randint(5, 90, (1, length - 1), generator=torch.Generator().manual_seed(2))
    assert logits(model, ids).isfinite().all()


def test_longformer_pads_embeddings_to_its_window_and_the_padding_needs_rows() -> None:
    model = tiny_model("LongformerForMaskedLM", meta=False, attention_window=8)
    patch_model(model, "learned", max_length=50)
    ids = torch.randint(5, 90, (1, 50), generator=torch.Generator().manual_seed(2))
    assert logits(model, ids).isfinite().all()  # the padding of ids takes no row
    embeddings = model.get_input_embeddings()(ids)
    assert model(inputs_embeds=embeddings[:, :48]).logits.isfinite().all()
    with pytest.raises(
        PositionRangeError, match=r"56 positions \(inputs_embeds are padded to a multiple of 8\).* 50\."
    ):
        model(inputs_embeds=embeddings[:, :49])
