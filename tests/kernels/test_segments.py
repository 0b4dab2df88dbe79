"""Masks as segments, and segments as calls: against the mask itself, and against all scores in float64."""

from __future__ import annotations

from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_posswap.kernels import blockwise, row_bias
from hf_posswap.kernels import segments as mask_segments
from hf_posswap.kernels.blockwise import attend_by_distance, attend_made, by_line, seen_distances
from hf_posswap.kernels.merge import Region, attend_regions
from hf_posswap.kernels.row_bias import attend_linear
from hf_posswap.kernels.segments import Segment, placed, segments_of, tiles, together, whole
from tests.kernels.gradients import same_with_gradients

SCALING = 0.3


class Row(NamedTuple):
    """One row of a batch: what is padded, where its documents end, how far it looks back."""

    left: int
    right: int
    documents: tuple[int, ...]
    window: int | None


@st.composite
def rows(draw: st.DrawFn, length: int) -> Row:
    left = draw(st.integers(0, length - 1))
    right = draw(st.integers(0, length - 1 - left))
    ends = draw(st.lists(st.integers(left + 1, max(left + 1, length - right - 1)), max_size=3, unique=True))
    return Row(left, right, tuple(sorted(ends)), draw(st.none() | st.integers(1, 9)))


@st.composite
def batches(draw: st.DrawFn, longest: int = 14) -> tuple[Tensor, Tensor]:
    """A causal mask [B, 1, Q, K] of the last Q of K tokens, and the positions [B, K] of the tokens."""
    keys = draw(st.integers(1, longest))
    queries = draw(st.integers(1, keys))
    made = [row_of(draw(rows(keys)), keys) for _ in range(draw(st.integers(1, 3)))]
    mask = torch.stack([mask for mask, _ in made])[:, None, keys - queries :]
    return mask, torch.stack([positions for _, positions in made])


def row_of(row: Row, keys: int) -> tuple[Tensor, Tensor]:
    at = torch.arange(keys)
    document = sum((at >= end).long() for end in row.documents) + torch.zeros_like(at)
    seen = (at <= at[:, None]) & (document == document[:, None])
    if row.window is not None:
        seen &= at > at[:, None] - row.window
    real = (at >= row.left) & (at < keys - row.right)
    starts = torch.tensor([row.left, *row.documents])
    return seen & real, (at - starts[document]).clamp(min=0)


def drawn_back(segments: tuple[Segment, ...], shape: torch.Size) -> Tensor:
    """Return the mask [B, 1, Q, K] that `segments` tell, by their definition."""
    mask = torch.zeros(shape, dtype=torch.bool)
    for rows, queries, keys, first, last, *_ in segments:
        for query in range(*queries):
            for key in range(*keys):
                a, b = query - queries[0], key - keys[0]
                if (first is None or b >= a + first) and (last is None or b <= a + last):
                    assert not mask[rows[0] : rows[1], 0, query, key].any(), "seen twice"
                    mask[rows[0] : rows[1], 0, query, key] = True
    return mask


@settings(max_examples=200)
@given(
    queries=st.integers(0, 12),
    keys=st.integers(0, 12),
    first=st.none() | st.integers(-14, 14),
    last=st.none() | st.integers(-14, 14),
)
def test_tiles_cover_each_pair_once(queries: int, keys: int, first: int | None, last: int | None) -> None:
    covered = torch.zeros(30, 30, dtype=torch.long)
    for kind, (start, stop), (low, high) in tiles((5, 5 + queries), (3, 3 + keys), first, last):
        assert start < stop
        assert low < high
        assert kind == "full" or (stop - start == high - low and (kind == "below" or stop - start > 1))
        part = torch.ones(stop - start, high - low, dtype=torch.long)
        covered[start:stop, low:high] += {"full": part, "below": part.tril(), "above": part.triu(1)}[kind]
    a, b = torch.arange(30)[:, None] - 5, torch.arange(30) - 3
    expected = (a >= 0) & (a < queries) & (b >= 0) & (b < keys)
    if first is not None:
        expected &= b >= a + first
    if last is not None:
        expected &= b <= a + last
    assert torch.equal(covered, expected.long())


@settings(max_examples=100)
@given(batch=batches(), block=st.integers(1, 6), additive=st.sampled_from(["bool", "-inf", "lowest"]))
def test_segments_are_the_mask(batch: tuple[Tensor, Tensor], block: int, additive: str) -> None:
    mask, _ = batch
    given_mask = mask
    if additive != "bool":
        lowest = torch.finfo(torch.float32).min if additive == "lowest" else -torch.inf
        given_mask = torch.zeros(mask.shape).masked_fill(~mask, lowest)
    with patch.object(mask_segments, "BLOCK", block):
        found = segments_of(given_mask, len(mask), mask.shape[-1])
    assert found is not None
    assert torch.equal(drawn_back(found, mask.shape), mask)
    bounds = [one.seen_by(query, query) for one in found for query in range(*one.queries)]
    seen = [one for row in mask[:, 0] for one in row if one.any()]
    assert len(seen) == sum((one.rows[1] - one.rows[0]) * (one.queries[1] - one.queries[0]) for one in found)
    assert all(low < high for low, high in bounds), "each query of a segment sees something"


@settings(max_examples=150)
@given(data=st.data(), queries=st.integers(1, 5), keys=st.integers(1, 6))
def test_any_mask_is_told_rightly_or_not_at_all(data: st.DataObject, queries: int, keys: int) -> None:
    flat = data.draw(st.lists(st.booleans(), min_size=2 * queries * keys, max_size=2 * queries * keys))
    mask = torch.tensor(flat).view(2, 1, queries, keys)
    found = segments_of(mask, 2, keys)
    gaps = any((row.diff() != 0).sum() > int(not row[0]) + int(not row[-1]) for row in mask.long().flatten(0, 2))
    if any(not row.any() for row in mask.flatten(0, 2)):
        return  # a row without keys has no changes either
    assert (found is None) == gaps
    if found is not None:
        assert torch.equal(drawn_back(found, mask.shape), mask)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(1, 2, 3, 3, dtype=torch.bool),  # heads differ
        torch.ones(1, 1, 3, 2, dtype=torch.bool),  # fewer than the keys
        torch.zeros(1, 1, 3, 3).fill_(-1.0),  # weighed, not masked
        torch.zeros(1, 1, 3, 3, dtype=torch.long),
        torch.tensor([[[[True, False, True]]]]),
        torch.ones(3, 3, dtype=torch.bool),
    ],
    ids=["heads", "short", "weights", "integers", "gap", "no batch"],
)
def test_what_is_no_mask_of_segments_is_none(mask: Tensor) -> None:
    assert segments_of(mask, 1, 3) is None


def test_too_many_segments_are_none() -> None:
    every_other = torch.eye(mask_segments.MOST_SEGMENTS + 2, dtype=torch.bool)[None, None]
    assert segments_of(every_other, 1, every_other.shape[-1]) is not None, "a diagonal is one"
    paired = torch.block_diag(*[torch.ones(2, 2)] * (mask_segments.MOST_SEGMENTS + 1)).bool()[None, None]
    assert segments_of(paired, 1, paired.shape[-1]) is None


def test_rows_that_share_a_mask_are_read_once() -> None:
    mask = torch.ones(4, 4, dtype=torch.bool).tril()[None, None].expand(3, 1, 4, 4)
    assert segments_of(mask, 3, 4) == whole(3, 4, 4, causal=True)
    assert segments_of(mask.clone(), 3, 4) == whole(3, 4, 4, causal=True)
    assert segments_of(mask[:1], 3, 4) == whole(3, 4, 4, causal=True)


def test_positions_that_do_not_rise_by_one_are_told() -> None:
    (one,) = whole(2, 4, 4, causal=True)
    at = torch.tensor([[0, 1, 2, 3], [5, 6, 8, 9]])
    assert placed(one, at, at) == [
        (one._replace(rows=(0, 1)), True),
        (one._replace(rows=(1, 2), start=5), False),
    ]
    assert placed(one, at[:1], at[:1]) == [(one, True)]


def regular(mask: Tensor, positions: Tensor) -> list[Segment]:
    found = segments_of(mask, len(mask), mask.shape[-1])
    assert found is not None
    laid = [one for segment in found for one in placed(segment, positions[:, -mask.shape[2] :], positions)]
    assert all(rises for _, rises in laid if rises)
    return together([one for one, rises in laid if rises and one.distances[0] >= 0])


def kept(mask: Tensor, segments: list[Segment]) -> Tensor:
    return mask & drawn_back(tuple(segments), mask.shape)


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def tensors(mask: Tensor, heads: int = 4, groups: int = 2) -> list[Tensor]:
    batch, _, queries, keys = mask.shape
    return [noise(batch, heads, queries, 8), noise(batch, groups, keys, 8), noise(batch, groups, keys, 8)]


def dense(scores: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Return attention from all scores [B, H, Q, K], zeros for queries that see nothing."""
    shown = scores.masked_fill(~seen, -torch.inf)
    any_key = seen.any(dim=-1, keepdim=True)
    chances = torch.where(any_key, shown, 0.0).softmax(-1) * any_key
    return chances @ value.repeat_interleave(scores.shape[1] // value.shape[1], dim=1)


def products(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(-1, -2) * SCALING


def apart(mask: Tensor, positions: Tensor) -> Tensor:
    return positions[:, None, -mask.shape[2] :, None] - positions[:, None, None]  # [B, 1, Q, K]


@settings(max_examples=60)
@given(batch=batches(), block=st.integers(1, 16), windowed=st.booleans())
def test_a_linear_penalty(batch: tuple[Tensor, Tensor], block: int, windowed: bool) -> None:
    mask, positions = batch
    segments = regular(mask, positions)
    if not segments:
        return
    qkv, slopes = tensors(mask), torch.tensor([0.5, 0.25, 0.125, 0.0], dtype=torch.float64)
    with patch.object(row_bias, "BLOCK", block), patch.object(row_bias, "SMALLEST", 1):
        found = attend_linear(*qkv, slopes, scaling=SCALING, windowed=windowed, segments=segments)
    scores = products(*qkv[:2]) - slopes[:, None, None] * apart(mask, positions)
    same_with_gradients(found, dense(scores, qkv[2], kept(mask, segments)), qkv)


@settings(max_examples=60)
@given(batch=batches(), block=st.integers(1, 16), learned=st.booleans())
def test_a_bias_by_distance(batch: tuple[Tensor, Tensor], block: int, learned: bool) -> None:
    mask, positions = batch
    segments = regular(mask, positions)
    segments = [one for one, told in zip(segments, by_line(segments), strict=True) if told]
    if not segments:
        return
    qkv, (least, most) = tensors(mask), seen_distances(segments)
    line = noise(4, most - least + 1).detach().requires_grad_(learned)
    with patch.multiple(blockwise, BLOCK=block, LEARNED_BLOCK=block):
        found = attend_by_distance(*qkv, line, scaling=SCALING, segments=segments)
        at = (apart(mask, positions) - least).clamp(0, most - least)[:, 0]
        scores = products(*qkv[:2]) + line[:, at].transpose(0, 1)
        leaves = [*qkv, line] if learned else qkv
        same_with_gradients(found, dense(scores, qkv[2], kept(mask, segments)), leaves)


@settings(max_examples=60)
@given(batch=batches(), pairs=st.sampled_from([1, 40, 10_000]))
def test_a_bias_that_is_made(batch: tuple[Tensor, Tensor], pairs: int) -> None:
    mask, positions = batch
    segments = segments_of(mask, len(mask), mask.shape[-1])
    assert segments is not None
    if not segments:
        return
    qkv, weight = tensors(mask), noise(4)
    away = apart(mask, positions) * 0.3

    def make(rows: slice, queries: slice, keys: slice) -> Tensor:
        return (weight[:, None, None] * away[rows, :, queries, keys]).sin()

    with patch.multiple(blockwise, PAIRS=pairs, LEAST_ROWS=1):
        found = attend_made(*qkv, make, [weight], None, scaling=SCALING, causal=True, segments=segments)
        scores = products(*qkv[:2]) + (weight[:, None, None] * away).sin()
        same_with_gradients(found, dense(scores, qkv[2], mask), [*qkv, weight])


@settings(max_examples=120)
@given(batch=batches(longest=20), size=st.integers(2, 6), chunked=st.booleans())
def test_two_rotations(batch: tuple[Tensor, Tensor], size: int, chunked: bool) -> None:
    mask, positions = batch
    segments = regular(mask, positions)
    if not segments:
        return
    regions = [Region(1, 0, size), Region(1, size, None)]
    if chunked:
        regions = [Region(size, 0, 1), Region(size, 1, 2), Region(size, 2, None)]
    inputs = [tensors(mask) for _ in regions]
    pairs, value = [(query, key) for query, key, _ in inputs], inputs[0][2]
    found = attend_regions(pairs, value, regions, scaling=SCALING, segments=segments)
    scores = torch.zeros(*mask.shape[:1], 4, *mask.shape[2:], dtype=torch.float64)
    at = positions[:, None, -mask.shape[2] :, None], positions[:, None, None]
    for pair, region in zip(pairs, regions, strict=True):
        scores = torch.where(region.holds(*at), products(*pair), scores)
    leaves = [x for pair in pairs for x in pair] + [value]
    same_with_gradients(found, dense(scores, value, kept(mask, segments)), leaves)


def test_two_masks_of_one_line_are_told_apart() -> None:
    """A prefix that sees itself both ways and a causal rest: no one line of numbers masks for both."""
    prefix, rest = Segment((0, 1), (0, 4), (0, 4)), Segment((0, 1), (4, 8), (0, 8), last=4, apart=4)
    assert by_line([prefix, rest]) == [False, True]
    assert by_line([prefix]) == [True]
    padding = Segment((0, 1), (6, 8), (0, 6), apart=6)
    assert by_line([Segment((0, 1), (0, 6), (0, 6), last=0), padding]) == [True, True]
    near, ramp = Segment((0, 1), (3, 8), (1, 8), first=0, last=2, apart=2), Segment((0, 1), (0, 3), (0, 3), last=0)
    assert by_line([ramp, near]) == [True, True]
    assert by_line([Segment((0, 1), (0, 5), (0, 5), last=0), near]) == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_dtypes_err_no_more_than_their_own_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    seen, positions = zip(*(row_of(row, 300) for row in (Row(70, 0, (), None), Row(0, 40, (128,), None))), strict=True)
    mask, at = torch.stack(seen)[:, None], torch.stack(positions)
    segments = regular(mask, at)
    qkv = [x.detach().to(dtype) for x in tensors(mask)]
    slopes = torch.tensor([2.0**-n for n in range(1, 5)])
    wide = [x.double() for x in qkv]
    exact = dense(products(*wide[:2]) - slopes[:, None, None].double() * apart(mask, at), wide[2], kept(mask, segments))
    bound = 1e-5 if dtype == torch.float32 else 4 * 2**-8 * float(exact.abs().max())
    least, most = seen_distances(segments)
    line = -slopes[:, None] * torch.arange(least, most + 1)
    for found in (
        attend_linear(*qkv, slopes, scaling=SCALING, segments=segments),
        attend_by_distance(*qkv, line, scaling=SCALING, segments=segments),
    ):
        assert found.dtype == dtype
        assert (found.double() - exact).abs().max() < bound
