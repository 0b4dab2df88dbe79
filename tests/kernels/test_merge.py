"""Two rotations in one attention, merged: against the scores of every pair, written out, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_posswap.kernels.merge import Region, attend_regions, mergeable
from hf_posswap.kernels.segments import Segment

EXACT = 1e-12
"""Between sums of float64 in another order."""


def windowed(window: int) -> list[Region]:
    return [Region(1, 1 - window, window), Region(1, window, None), Region(1, None, 1 - window)]


def chunked(size: int) -> list[Region]:
    ahead = [Region(size, -1, 0), Region(size, None, -1)]
    return [Region(size, 0, 1), Region(size, 1, 2), Region(size, 2, None), *ahead]


def every_pair(
    pairs: Sequence[tuple[Tensor, Tensor]], value: Tensor, regions: Sequence[Region], scaling: float, prefix: int = 0
) -> Tensor:
    """Return what `attend_regions` does, from all scores, region by region in a loop over pairs of positions.

    The first `prefix` tokens see each other.
    """
    share, length = pairs[0][0].shape[1] // value.shape[1], value.shape[2]
    scores = pairs[0][0].new_full((*pairs[0][0].shape[:3], length), -torch.inf)
    for (query, key), (size, low, high) in zip(pairs, regions, strict=True):
        part = query @ key.repeat_interleave(share, dim=1).transpose(-1, -2) * scaling
        held = torch.tensor(
            [[(j <= i or i < prefix > j) and lowest(low) <= i // size - j // size < highest(high)
              for j in range(length)] for i in range(length)]
        )  # fmt: skip
        scores = torch.where(held, part, scores)
    return scores.softmax(-1) @ value.repeat_interleave(share, dim=1)


def lowest(low: int | None) -> float:
    return -float("inf") if low is None else low


def highest(high: int | None) -> float:
    return float("inf") if high is None else high


def prefixed(prefix: int, length: int) -> tuple[Segment, ...]:
    """Return what is seen where the first `prefix` of `length` tokens see each other."""
    first = Segment((0, 2), (0, prefix), (0, prefix))
    rest = Segment((0, 2), (prefix, length), (0, length), last=prefix, apart=prefix)
    return tuple(one for one in (first, rest) if one.queries[0] < one.queries[1])


def tensors(
    count: int, heads: int, groups: int, length: int, seed: int = 0
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    source = torch.Generator().manual_seed(seed)

    def one(number: int) -> Tensor:
        # laid out as a model's are: [B, L, heads, D], seen as [B, heads, L, D]
        made = torch.randn(2, length, number, 8, generator=source, dtype=torch.float64)
        return made.transpose(1, 2).requires_grad_()

    return [(one(heads), one(groups)) for _ in range(count)], one(groups)


def check(regions: list[Region], heads: int, groups: int, length: int, prefix: int) -> None:
    prefix = min(prefix, length)
    pairs, value = tensors(len(regions), heads, groups, length)
    leaves = [x for pair in pairs for x in pair] + [value]
    found = attend_regions(pairs, value, regions, scaling=0.3, segments=prefixed(prefix, length) if prefix else None)
    expected = every_pair(pairs, value, regions, scaling=0.3, prefix=prefix)
    torch.testing.assert_close(found, expected, atol=EXACT, rtol=0)
    weight = torch.randn_like(found)
    ours = torch.autograd.grad((found * weight).sum(), leaves)
    theirs = torch.autograd.grad((expected * weight).sum(), leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=EXACT, rtol=0)


PREFIXES = st.sampled_from([0, 0, 1, 13, 50])


@settings(max_examples=25)
@given(
    window=st.integers(1, 24), length=st.integers(1, 50), heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    prefix=PREFIXES,
)  # fmt: skip
def test_a_window_and_the_rest(window: int, length: int, heads: tuple[int, int], prefix: int) -> None:
    check(windowed(window), *heads, length, prefix)


@settings(max_examples=40)
@given(
    size=st.integers(2, 20), length=st.integers(1, 50), heads=st.sampled_from([(1, 1), (4, 2), (3, 3)]),
    prefix=PREFIXES,
)  # fmt: skip
def test_chunked_attention_equals_the_brute_force(size: int, length: int, heads: tuple[int, int], prefix: int) -> None:
    check(chunked(size), *heads, length, prefix)


def test_float32_errs_no_more_than_a_softmax_does() -> None:
    pairs, value = tensors(3, 4, 2, 700)
    with torch.no_grad():
        exact = every_pair(pairs, value, windowed(96), scaling=8**-0.5)
        single = [(query.float(), key.float()) for query, key in pairs]
        found = attend_regions(single, value.float(), windowed(96), scaling=8**-0.5)
    assert (found - exact).abs().max() < 1e-5


def test_bfloat16_errs_no_more_than_its_own_rounding() -> None:
    pairs, value = tensors(3, 4, 2, 300)
    with torch.no_grad():
        half = [(query.bfloat16(), key.bfloat16()) for query, key in pairs]
        exact = every_pair([(q.double(), k.double()) for q, k in half], value.bfloat16().double(), windowed(64), 0.3)
        found = attend_regions(half, value.bfloat16(), windowed(64), scaling=0.3)
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).abs().max() < 4 * 2**-8 * exact.abs().max()


@pytest.mark.parametrize(
    ("regions", "known"),
    [
        (windowed(4), True),
        (chunked(4), True),
        ([Region(1, None, -3), Region(1, -3, 4), Region(1, 5, None)], False),  # distance 4 is in none
        ([Region(1, None, -3), Region(1, -3, 4), Region(1, 3, None)], False),  # distance 3 is in two
        ([Region(1, None, -3), Region(1, -3, 4)], False),
        ([Region(1, 0, 4), Region(1, 4, None)], False),  # keys that stand later are in none
        ([Region(1, None, 0), Region(1, 0, 2), Region(1, 2, 4), Region(1, 4, None)], False),
        ([Region(4, None, 0), Region(4, 0, 2), Region(4, 2, None)], False),
        ([Region(4, None, 0), Region(4, 0, 1), Region(3, 1, None)], False),
        ([Region(1, None, 1), Region(1, 1, 1), Region(1, 1, None)], False),  # one that is empty
    ],
)
def test_what_is_not_known_is_not_tried(regions: list[Region], known: bool) -> None:
    assert mergeable(regions) == known


@given(size=st.integers(1, 9), low=st.none() | st.integers(-3, 3), high=st.none() | st.integers(-2, 8))
def test_a_region_holds_what_its_definition_says(size: int, low: int | None, high: int | None) -> None:
    region = Region(size, low, high)
    at = torch.arange(3, 23)
    found = region.holds(at[:, None], at).expand(20, 20)
    for i, j in torch.cartesian_prod(torch.arange(20), torch.arange(20)).tolist():
        apart = (i + 3) // size - (j + 3) // size
        assert found[i, j] == (lowest(low) <= apart < highest(high))
        assert not (region.is_ahead and found[i, j] and j <= i)
