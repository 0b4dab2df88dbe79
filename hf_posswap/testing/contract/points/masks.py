"""Padding is not seen, documents do not leak, and every attention implementation gives the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posswap.compat.transformers_attention import attention_implementation
from hf_posswap.testing.contract.checks import CHANGE, NOISE, check, check_differs, check_same, gap
from hf_posswap.testing.contract.models import LENGTH, PADDING
from hf_posswap.testing.contract.pairs import Pair, attend, words
from hf_posswap.testing.contract.point import not_convolved, placed, point

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IDS = words(2, 20)
PADDED = 6
IMPLEMENTATIONS = ("sdpa", "eager")
"""Both for the few: that the two agree is asked of every scheme below."""


def left_padded() -> tuple[Tensor, Tensor]:
    """Return ids and mask [2, 20], the second row padded on the left."""
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    ids[1, :PADDED], mask[1, :PADDED] = PADDING, 0
    return ids, mask


def right_padded() -> tuple[Tensor, Tensor]:
    """Return ids and mask [2, 20], the second row padded on the right."""
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    ids[1, -PADDED:], mask[1, -PADDED:] = PADDING, 0
    return ids, mask


def first_position(pair: Pair) -> int:
    """Return what the model calls position 0 in `position_ids`: RoBERTa counts from its padding id + 1."""
    return pair.at.first_position


def counted(pair: Pair, mask: Tensor) -> Tensor:
    """Return the position ids that `generate` makes of a mask."""
    return (mask.cumsum(1) - 1).clamp(min=0) + first_position(pair)


@point(placed, not_convolved, parameter="implementation", values=IMPLEMENTATIONS, few_values=("eager",), of_stock=True)
def left_padding_with_position_ids(pair: Pair, implementation: str) -> None:
    """A row padded on the left, with position ids that count its tokens, gives the logits of the row alone."""
    model = pair.specimen(implementation)
    ids, mask = left_padded()
    actual = pair.logits(model, ids, attention_mask=mask, position_ids=counted(pair, mask))
    alone = pair.logits(model, ids[1:, PADDED:])[0]
    check_same(pair.rows(actual[1], PADDED), alone, pair.noise, "the logits of the row alone")
    check_same(actual[0], pair.logits(model, ids[:1])[0], pair.noise, "the logits of the other row alone")


@point(lambda pair: pair.relative and (not pair.limits.convolves), of_stock=True)
def left_padding_without_position_ids(pair: Pair) -> None:
    """A row padded on the left, without position ids, gives the logits of the row alone: the traits say relative."""
    model = pair.specimen()
    ids, mask = left_padded()
    actual = pair.logits(model, ids, attention_mask=mask)
    alone = pair.logits(model, ids[1:, PADDED:])[0]
    check_same(pair.rows(actual[1], PADDED), alone, pair.noise, "the logits of the row alone")


@point(not_convolved, parameter="implementation", values=IMPLEMENTATIONS, few_values=("eager",), of_stock=True)
def right_padding(pair: Pair, implementation: str) -> None:
    """A row padded on the right gives the logits of the row alone."""
    model = pair.specimen(implementation)
    ids, mask = right_padded()
    actual = pair.logits(model, ids, attention_mask=mask)
    alone = pair.logits(model, ids[1:, :-PADDED])[0]
    check_same(pair.rows(actual[1], None, -PADDED), alone, pair.noise, "the logits of the row alone")
    check_same(actual[0], pair.logits(model, ids[:1])[0], pair.noise, "the logits of the other row alone")


def packed(pair: Pair, model: PreTrainedModel) -> Tensor:
    """Return the logits of the second of two documents in one row: no mask, positions that restart, no cache."""
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    return pair.logits(model, IDS[:1], attention_mask=None, position_ids=positions, use_cache=False)[:, 8:]


@point(
    placed,
    lambda pair: pair.causal,
    parameter="implementation",
    values=IMPLEMENTATIONS,
    few_values=("eager",),
    of_stock=True,
)
def packed_documents_do_not_leak(pair: Pair, implementation: str) -> None:
    """Documents packed into one row, with positions that restart, do not see each other."""
    native, model = pair.native_with(implementation), pair.specimen(implementation)
    leaks = gap(packed(pair, native), pair.logits(native, IDS[:1, 8:])) > NOISE
    check(not leaks or pair.limits.leaks, "a stock class that keeps documents apart", "it does not")
    if not leaks:
        check_same(packed(pair, model), pair.logits(model, IDS[:1, 8:]), pair.noise, "the second document's logits")


@point(placed, lambda pair: pair.plan.route == "plugin")
def random_positions_are_used_as_given(pair: Pair) -> None:
    """Positions with holes act as given.

    Positions with holes (PoSE, interpolation) must act: an all-ones mask keeps transformers from packing.

    Where the native class takes no position ids, it drops them silently; swapped, it goes by them.
    """
    holes = torch.cat([torch.arange(5), torch.arange(16, 31)])[None] + first_position(pair)  # inside a chunk of Llama 4
    native, actual = (
        gap(pair.logits(model, IDS[:1], position_ids=holes), pair.logits(model, IDS[:1]))
        for model in (pair.native(), pair.specimen())
    )
    takes = pair.takes("position_ids")
    check((native > 0) == takes, f"position ids that the stock class {'uses' if takes else 'drops'}", native)
    acts = pair.plan.scheme.kind != "none"
    if acts and actual <= CHANGE and pair.may_act_late and not pair.tabled:  # nothing within the window: then beyond it
        actual = gap(
            pair.logits(pair.specimen(), IDS[:1], position_ids=holes * LENGTH), pair.logits(pair.specimen(), IDS[:1])
        )
    expected = f"logits that {'change' if acts else 'do not change'} by positions with holes"
    check((actual > CHANGE) == acts, expected, f"they differ by {actual:.3g}")


@point()
def sdpa_equals_eager_and_the_choice_is_kept(pair: Pair) -> None:
    """Sdpa and eager attention give the same logits, and the choice is kept."""
    model = pair.swapped()
    attend(model, "sdpa")
    sdpa = pair.logits(model, IDS)
    kept = not attend(model, "eager") or attention_implementation(model.config) == "eager"
    check(kept, "eager attention, as was chosen", attention_implementation(model.config))
    check_same(pair.logits(model, IDS), sdpa, pair.noise, "by eager attention the logits of sdpa")
    other = pair.native_with("eager")
    pair.patch(other)
    check(
        attention_implementation(other.config) == "eager",
        "eager attention, as before",
        attention_implementation(other.config),
    )
    check_same(pair.logits(other, IDS), sdpa, pair.noise, "by eager attention the logits of sdpa")
    attend(other, "sdpa")
    check_same(pair.logits(other, IDS), sdpa)


@point(few=True)
def embeddings_in_place_of_ids(pair: Pair) -> None:
    """Embeddings in place of token ids give the same logits."""
    if pair.limits.counts_embeddings_otherwise and pair.tabled:
        check_differs(embedded(pair, pair.native()), pair.logits(pair.native(), IDS), NOISE)
        return
    check_same(embedded(pair, pair.specimen()), pair.logits(pair.specimen(), IDS), pair.noise)


def embedded(pair: Pair, model: Any) -> Tensor:
    """Return the logits of the words' embeddings."""
    reader = model.get_submodule(pair.at.entry) if pair.stack else model
    with torch.no_grad():
        embeddings = reader.get_input_embeddings()(IDS)
        return model(**pair.given(inputs_embeds=embeddings, attention_mask=torch.ones_like(IDS))).logits


@point(few=True, of_stock=True)
def no_mask_at_all_equals_all_ones(pair: Pair) -> None:
    """No attention mask gives what one of ones does."""
    model = pair.specimen()
    ids = words(2, LENGTH - 3)
    check_same(pair.logits(model, ids, attention_mask=None), pair.logits(model, ids), pair.noise)
