"""Two rotations in one attention, merged: against the scores of every pair, written out, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_posswap.kernels.merge import Region, attend_regions, mergeable

EXACT = 1e-12
"""Between sums of float64 in another order."""


def windowed(window: int) -> list[Region]:
    return [Region(1, 0, window), Region(1, window, None)]


def chunked(size: int) -> list[Region]:
    return [Region(size, 0, 1), Region(size, 1, 2), Region(size, 2, None)]


def every_pair(
    pairs: Sequence[tuple[Tensor, Tensor]], value: Tensor, regions: Sequence[Region], scaling: float
) -> Tensor:
    """Return what `attend_regions` does, from all scores, region by region in a loop over pairs of positions."""
    share, length = pairs[0][0].shape[1] // value.shape[1], value.shape[2]
    scores = pairs[0][0].new_full((*pairs[0][0].shape[:3], length), -torch.inf)
    for (query, key), (size, low, high) in zip(pairs, regions, strict=True):
        part = query @ key.repeat_interleave(share, dim=1).transpose(-1, -2) * scaling
        held = torch.tensor(
            [[j <= i and low <= i // size - j // size < (high or length + 1) for j in range(length)]
             for i in range(length)]
        )  # fmt: skip
        scores = torch.where(held, part, scores)
    return scores.softmax(-1) @ value.repeat_interleave(share, dim=1)


def tensors(
    count: int, heads: int, groups: int, length: int, seed: int = 0
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    source = torch.Generator().manual_seed(seed)

    def one(number: int) -> Tensor:
        # laid out as a model's are: [B, L, heads, D], seen as [B, heads, L, D]
        made = torch.randn(2, length, number, 8, generator=source, dtype=torch.float64)
        return made.transpose(1, 2).requires_grad_()

    return [(one(heads), one(groups)) for _ in range(count)], one(groups)


def check(regions: list[Region], heads: int, groups: int, length: int) -> None:
    pairs, value = tensors(len(regions), heads, groups, length)
    leaves = [x for pair in pairs for x in pair] + [value]
    found = attend_regions(pairs, value, regions, scaling=0.3)
    expected = every_pair(pairs, value, regions, scaling=0.3)
    torch.testing.assert_close(found, expected, atol=EXACT, rtol=0)
    weight = torch.randn_like(found)
    ours = torch.autograd.grad((found * weight).sum(), leaves)
    theirs = torch.autograd.grad((expected * weight).sum(), leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=EXACT, rtol=0)


@settings(max_examples=25)
@given(
    window=st.integers(1, 24), length=st.integers(1, 50), heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)])
)  # fmt: skip
def test_a_window_and_the_rest(window: int, length: int, heads: tuple[int, int]) -> None:
    check(windowed(window), *heads, length)


@settings(max_examples=40)
@given(size=st.integers(2, 20), length=st.integers(1, 50), heads=st.sampled_from([(1, 1), (4, 2), (3, 3)]))
def test_chunked_attention_equals_the_brute_force(size: int, length: int, heads: tuple[int, int]) -> None:
    check(chunked(size), *heads, length)


def test_float32_errs_no_more_than_a_softmax_does() -> None:
    pairs, value = tensors(2, 4, 2, 700)
    with torch.no_grad():
        exact = every_pair(pairs, value, windowed(96), scaling=8**-0.5)
        single = [(query.float(), key.float()) for query, key in pairs]
        found = attend_regions(single, value.float(), windowed(96), scaling=8**-0.5)
    assert (found - exact).abs().max() < 1e-5


def test_bfloat16_errs_no_more_than_its_own_rounding() -> None:
    pairs, value = tensors(2, 4, 2, 300)
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
        ([Region(1, 0, 4), Region(1, 5, None)], False),  # distance 4 is in neither
        ([Region(1, 0, 4), Region(1, 3, None)], False),  # distance 3 is in both
        ([Region(1, 0, 4)], False),
        ([Region(1, 0, 2), Region(1, 2, 4), Region(1, 4, None)], False),
        ([Region(4, 0, 2), Region(4, 2, None)], False),
        ([Region(4, 0, 1), Region(3, 1, None)], False),
        ([Region(1, 1, 4), Region(1, 4, None)], False),
    ],
)
def test_what_is_not_known_is_not_tried(regions: list[Region], known: bool) -> None:
    assert mergeable(regions) == known


@given(size=st.integers(1, 9), low=st.integers(0, 3), more=st.none() | st.integers(1, 5))
def test_a_region_holds_what_its_definition_says(size: int, low: int, more: int | None) -> None:
    region = Region(size, low, None if more is None else low + more)
    at = torch.arange(3, 23)
    found = region.holds(at[:, None], at)
    for i, j in torch.cartesian_prod(torch.arange(20), torch.arange(20)).tolist():
        apart = (i + 3) // size - (j + 3) // size
        expected = j <= i and apart >= low and (more is None or apart < low + more)
        assert found[i, j] == expected
