"""Attention whose near and far keys are rotated differently, from plain causal fused calls.

In Self-Extend, ReRoPE and dual chunk attention, the distance of a query and a key, in tokens or in chunks, determines
which pair of rotations scores them. Each such region is a few calls without a mask, so the total cost is little more
than that of one causal call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from hf_posswap.kernels.calls import Call, arranged, attend
from hf_posswap.kernels.segments import Segment, Tile, tiles, whole
from hf_posswap.rope_math import groups_of


class Region(NamedTuple):
    """The pairs of a query at i and a key at j with low <= floor(i/size) - floor(j/size) < high.

    Attributes:
        size: tokens per chunk; 1: the bounds are distances in tokens.
        low: lower bound of the distance, negative if the key is after the query; None: no bound.
        high: exclusive upper bound; None: no bound.
    """

    size: int
    low: int | None
    high: int | None

    @property
    def is_ahead(self) -> bool:
        """Whether each key is after its query, so that causal attention has no pair here."""
        return self.high is not None and self.high <= 0

    def holds(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the mask of the pairs of positions, broadcast against each other, that are in the region.

        Example:
            >>> import torch
            >>> Region(size=1, low=0, high=2).holds(torch.tensor([5]), torch.tensor([3, 4, 5, 6]))
            tensor([False,  True,  True, False])
        """
        apart = groups_of(query, self.size) - groups_of(key, self.size) if self.size > 1 else query - key
        if self.low is None:
            return apart == apart if self.high is None else apart < self.high
        above_low = apart >= self.low
        return above_low if self.high is None else above_low & (apart < self.high)


class OfQueries(NamedTuple):
    """The pairs of a query at low <= i < high and any key.

    Attributes:
        low: the first position of a query; None: no bound.
        high: the one after the last; None: no bound.
    """

    low: int | None
    high: int | None

    @property
    def is_ahead(self) -> bool:
        """Whether each key is after its query: no."""
        return False

    def holds(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the mask of the pairs of positions, broadcast against each other, that are in it.

        Example:
            >>> import torch
            >>> OfQueries(low=4, high=6).holds(torch.tensor([[3], [4], [6]]), torch.tensor([0, 9])).tolist()
            [[False, False], [True, True], [False, False]]
        """
        is_inside = key == key
        if self.low is not None:
            is_inside = is_inside & (query >= self.low)
        return is_inside & (query == query if self.high is None else query < self.high)


def mergeable(regions: Sequence[Region]) -> bool:
    """Return whether `attend_regions` supports `regions`, and they contain every pair exactly once."""
    sizes = {region.size for region in regions}
    lows = sorted(region.low for region in regions if region.low is not None)
    highs = sorted(region.high for region in regions if region.high is not None)
    joined = lows == highs and len(lows) == len(regions) - 1  # one has no lower bound, one no upper bound
    bounded = [region.high - region.low for region in regions if region.low is not None and region.high is not None]
    one_step = all(width == 1 for width in bounded)
    windowed = sizes == {1} and len(regions) == 3 and min(bounded) > 0
    return len(sizes) == 1 and joined and (windowed or (sizes != {1} and one_step))


def attend_regions(
    pairs: Sequence[tuple[Tensor, Tensor]],
    value: Tensor,
    regions: Sequence[Region],
    *,
    scaling: float,
    segments: Sequence[Segment] | None = None,
) -> Tensor:
    """Return attention [B, H, Q, D], each region with its own rotation.

    Args:
        pairs: for each region query [B, H, Q, D] and key [B, G, K, D], rotated.
        value: [B, G, K, D].
        regions: as accepted by `mergeable`.
        scaling: multiplies the scores.
        segments: the visible keys; None: causal, with as many keys as queries, from position 0.
    """
    seen = segments or whole(value.shape[0], pairs[0][0].shape[2], value.shape[2], causal=True)
    return attend(pairs, value, region_calls(regions, seen), scaling=scaling)


def region_calls(regions: Sequence[Region | OfQueries], segments: Sequence[Segment]) -> tuple[Call, ...]:
    """Return the calls that score the pairs in `segments`, with the rotated pair of each region."""
    return arranged(
        Call.of(tile, pair, segment.rows)
        for segment in segments
        for pair, region in enumerate(regions)
        if not region.is_ahead or segment.distances[0] < 0
        for tile in (
            _by_query(segment, region)
            if isinstance(region, OfQueries)
            else (_by_distance if region.size == 1 else _by_chunk)(segment, region)
        )
    )


def _by_query(segment: Segment, region: OfQueries) -> Iterator[Tile]:
    """Yield the tiles for the keys that the queries of a region see."""
    start, stop = segment.queries
    at = segment.start + segment.apart  # position of the first query
    begin = start if region.low is None else max(start, start + region.low - at)
    end = stop if region.high is None else min(stop, start + region.high - at)
    back = begin - start  # the tiles count queries from `begin`
    first = None if segment.first is None else segment.first + back
    last = None if segment.last is None else segment.last + back
    yield from tiles((begin, end), segment.keys, first, last)


def _by_distance(segment: Segment, region: Region) -> Iterator[Tile]:
    """Yield the tiles for the keys of a segment at the distances of a region."""
    first, last = segment.first, segment.last
    if region.high is not None:
        nearest = segment.apart - region.high + 1
        first = nearest if first is None else max(first, nearest)
    if region.low is not None:
        farthest = segment.apart - region.low
        last = farthest if last is None else min(last, farthest)
    yield from tiles(segment.queries, segment.keys, first, last)


def _by_chunk(segment: Segment, region: Region) -> Iterator[Tile]:
    """Yield the tiles for the keys of a segment at the chunk distances of a region."""
    size, (low, high) = region.size, segment.keys
    offset = low - segment.start  # of a position in the tensor of the keys
    begin = segment.queries[0]
    while begin < segment.queries[1]:
        at = segment.start + segment.apart + begin - segment.queries[0]  # position of the first query
        chunk = at // size
        end = min(begin + size - at % size, segment.queries[1])
        top = high if region.low is None else min(high, (chunk - region.low + 1) * size + offset)
        bottom = low if region.high is None else max(low, (chunk - region.high + 1) * size + offset)
        if bottom < top:
            back = begin - segment.queries[0] - (bottom - low)  # keys are counted from `bottom`, queries from `begin`
            first = None if segment.first is None else segment.first + back
            last = None if segment.last is None else segment.last + back
            yield from tiles((begin, end), (bottom, top), first, last)
        begin = end
