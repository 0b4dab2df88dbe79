"""Padding is not seen, documents do not leak, and every attention implementation gives the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.attending import attend
from tests.contract.models import LENGTH, PADDING
from tests.contract.others import ALL
from tests.contract.pairs import CHANGE, NOISE, Pair, gap, logits, placed, words

IDS = words(2, 20)
PADDED = 6
LEAKY = (
    *("bert (is_decoder)", "opt", "house", "bloom", "falcon", "biogpt", "xglm", "mpt", "openai-gpt"),
    *("t5gemma", "gpt_oss (cos of half a head)", "qwen3_5 (sections of a text tower)", "zamba2", "trocr"),
)
"""Models whose own code lets packed documents see one another."""
COUNTS_EMBEDDINGS_OTHERWISE = ("esm",)
"""Models whose own code reads other rows of its table for embeddings than for the tokens that they are of."""
CONVOLVED = ("convbert",)
"""Models whose own code convolves padding with the words: it is seen beside attention, whatever the positions."""
IMPLEMENTATIONS = ("sdpa", pytest.param("eager", marks=pytest.mark.few))
"""Both for the few: that the two agree is asked of every scheme below."""

not_convolved = pytest.mark.pairs(lambda pair: pair.model not in CONVOLVED)


def left_padded() -> tuple[Tensor, Tensor]:
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    ids[1, :PADDED], mask[1, :PADDED] = PADDING, 0
    return ids, mask


def first_position(pair: Pair) -> int:
    """Return what the model calls position 0 in `position_ids`: RoBERTa counts from its padding id + 1."""
    return pair.at.first_position


def counted(pair: Pair, mask: Tensor) -> Tensor:
    """Return the position ids that `generate` makes of a mask."""
    return (mask.cumsum(1) - 1).clamp(min=0) + first_position(pair)


@placed
@not_convolved
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_left_padding_with_position_ids(pair: Pair, implementation: str) -> None:
    model = pair.specimen(implementation)
    ids, mask = left_padded()
    found = pair.logits(model, ids, attention_mask=mask, position_ids=counted(pair, mask))
    assert gap(pair.rows(found[1], PADDED), pair.logits(model, ids[1:, PADDED:])[0]) < pair.noise
    assert gap(found[0], pair.logits(model, ids[:1])[0]) < pair.noise


@pytest.mark.pairs(lambda pair: pair.relative and pair.model not in CONVOLVED)
def test_left_padding_without_position_ids(pair: Pair) -> None:
    model = pair.specimen()
    ids, mask = left_padded()
    found = pair.logits(model, ids, attention_mask=mask)
    assert gap(pair.rows(found[1], PADDED), pair.logits(model, ids[1:, PADDED:])[0]) < pair.noise


def right_padded() -> tuple[Tensor, Tensor]:
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    ids[1, -PADDED:], mask[1, -PADDED:] = PADDING, 0
    return ids, mask


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CONVOLVED)
def test_a_native_class_convolves_padding(name: str) -> None:
    model = ALL[name].build()
    ids, mask = right_padded()
    found = logits(model, ids, attention_mask=mask)
    assert gap(found[1, :-PADDED], logits(model, ids[1:, :-PADDED])[0]) > CHANGE


@not_convolved
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_right_padding(pair: Pair, implementation: str) -> None:
    model = pair.specimen(implementation)
    ids, mask = right_padded()
    found = pair.logits(model, ids, attention_mask=mask)
    assert gap(pair.rows(found[1], None, -PADDED), pair.logits(model, ids[1:, :-PADDED])[0]) < pair.noise
    assert gap(found[0], pair.logits(model, ids[:1])[0]) < pair.noise


def packed(pair: Pair, model: Any) -> Tensor:
    """Return the logits of the second of two documents in one row: no mask, positions that restart, no cache."""
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    return pair.logits(model, IDS[:1], attention_mask=None, position_ids=positions, use_cache=False)[:, 8:]


@placed
@pytest.mark.pairs(lambda pair: pair.causal)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_packed_documents_do_not_leak(pair: Pair, implementation: str) -> None:
    native, model = pair.native_with(implementation), pair.specimen(implementation)
    leaks = gap(packed(pair, native), pair.logits(native, IDS[:1, 8:])) > NOISE
    assert not leaks or pair.model in LEAKY, "the native model was thought to be tight"
    found = gap(packed(pair, model), pair.logits(model, IDS[:1, 8:]))
    assert found < pair.noise or leaks


@placed
@pytest.mark.pairs(lambda pair: pair.plan.route == "plugin")
def test_random_positions_are_used_as_given(pair: Pair) -> None:
    """Positions with holes (PoSE, interpolation) must act: an all-ones mask keeps transformers from packing.

    Where the native class takes no position ids, it drops them without a word; swapped, it goes by them.
    """
    holes = torch.cat([torch.arange(5), torch.arange(16, 31)])[None] + first_position(pair)  # inside a chunk of Llama 4
    native, found = (
        gap(pair.logits(model, IDS[:1], position_ids=holes), pair.logits(model, IDS[:1]))
        for model in (pair.native(), pair.specimen())
    )
    assert (native > 0) == pair.takes("position_ids")
    assert (found > CHANGE) == (pair.plan.scheme.kind != "none")


def test_sdpa_equals_eager_and_the_choice_is_kept(pair: Pair) -> None:
    model = pair.swapped()
    attend(model, "sdpa")
    sdpa = pair.logits(model, IDS)
    assert not attend(model, "eager") or model.config._attn_implementation == "eager"
    assert gap(pair.logits(model, IDS), sdpa) < pair.noise
    other = pair.native_with("eager")
    pair.patch(other)
    assert other.config._attn_implementation == "eager"
    assert gap(pair.logits(other, IDS), sdpa) < pair.noise
    attend(other, "sdpa")
    assert gap(pair.logits(other, IDS), sdpa) == 0


@pytest.mark.few
def test_embeddings_in_place_of_ids(pair: Pair) -> None:
    if pair.model in COUNTS_EMBEDDINGS_OTHERWISE and pair.tabled:
        assert gap(embedded(pair, pair.native()), pair.logits(pair.native(), IDS)) > NOISE
        return
    assert gap(embedded(pair, pair.specimen()), pair.logits(pair.specimen(), IDS)) < pair.noise


def embedded(pair: Pair, model: Any) -> Tensor:
    """Return the logits of the words' embeddings."""
    reader = model.get_submodule(pair.at.entry) if pair.stack else model
    with torch.no_grad():
        embeddings = reader.get_input_embeddings()(IDS)
        return model(**pair.given(inputs_embeds=embeddings, attention_mask=torch.ones_like(IDS))).logits


@pytest.mark.few
def test_no_mask_at_all_equals_all_ones(pair: Pair) -> None:
    model = pair.specimen()
    ids = words(2, LENGTH - 3)
    assert gap(pair.logits(model, ids, attention_mask=None), pair.logits(model, ids)) < pair.noise
