"""What a scheme promises in its traits: only differences of positions matter, any length runs, or a table ends."""

from __future__ import annotations

import torch

from hf_posswap.compat.transformers_calls import cache_in
from hf_posswap.errors import PositionRangeError
from hf_posswap.testing.contract.checks import CHANGE, NOISE, check, check_finite, check_same, gap, raises
from hf_posswap.testing.contract.pairs import LONGER, Pair, with_cache, words
from hf_posswap.testing.contract.point import placed, point
from hf_posswap.testing.contract.points.masks import first_position


@point(placed)
def only_differences_of_positions_matter_exactly_where_it_is_promised(pair: Pair) -> None:
    """Only differences of positions matter, exactly where the trait `relative` promises it."""
    model, ids = pair.specimen(), words(2, 12)
    shift = 299 if pair.traits.unbounded and pair.plan.cached_equals_full else 17
    positions = torch.arange(12).expand(2, -1) + first_position(pair)
    change = gap(
        pair.logits(model, ids, position_ids=positions + shift), pair.logits(model, ids, position_ids=positions)
    )
    if pair.relative:  # the angles of large positions are rounded more
        holds, expected = change < 4 * NOISE, f"the same logits {shift} positions later, up to {4 * NOISE:.2g}"
    else:
        holds, expected = change > CHANGE, f"other logits {shift} positions later, by more than {CHANGE}"
    check(holds, f"{expected}: the traits say relative={pair.relative}", f"they differ by {change:.3g}")


@point(lambda pair: not pair.tabled)
def without_a_table_any_length_runs(pair: Pair) -> None:
    """Without a position table any length runs, with or without a mask."""
    model, ids = pair.specimen(), words(2, 3 * LONGER)
    actual = pair.logits(model, ids)
    check_finite(actual, f"finite logits of {3 * LONGER} tokens")
    if pair.plan.cached_equals_full and pair.causal:
        start = pair.logits(model, ids[:, :LONGER])
        check_same(actual[:, :LONGER], start, NOISE, f"the logits of the first {LONGER} tokens alone")
    with torch.no_grad():
        again = model(**pair.given(input_ids=ids)).logits  # a mask left out
    check_same(again, actual, NOISE, "the same logits without a mask")


@point(lambda pair: pair.tabled)
def a_table_says_where_it_ends(pair: Pair) -> None:
    """A position table raises PositionRangeError past its end, and says where that is."""
    model, end = pair.specimen(), pair.plan.max_length
    check_finite(pair.logits(model, words(1, end)))
    with raises(PositionRangeError, match=rf"asked for {end + 1} positions.* ends at {end}.*max_length="):
        pair.logits(model, words(1, end + 1))
    with raises(PositionRangeError, match=f"ends at {end}"):
        model(**pair.given(inputs_embeds=torch.zeros(1, end + 1, 64)))
    if not pair.placed:
        return
    first = first_position(pair)
    last = torch.tensor([[end - 1 + first]])
    check_finite(pair.logits(model, words(1, 1), position_ids=last))
    with raises(PositionRangeError, match=rf"asked for {end + 1} positions"):
        pair.logits(model, words(1, 1), position_ids=last + 1)


@point(lambda pair: pair.tabled and pair.cached)
def a_table_ends_in_a_cache_too(pair: Pair) -> None:
    """A position table ends in a cache too."""
    model, end = pair.specimen(), pair.plan.max_length
    with torch.no_grad():
        cache = cache_in(model(**pair.given(input_ids=words(1, end - 1)), use_cache=True))
        model(**pair.given(input_ids=words(1, 1)), **with_cache(model, cache), use_cache=True)
        with raises(PositionRangeError, match=rf"asked for {end + 1} positions"):
            model(**pair.given(input_ids=words(1, 1)), **with_cache(model, cache), use_cache=True)
