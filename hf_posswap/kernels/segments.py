"""Segments of attention: consecutive queries that see consecutive keys, and the plain calls that cover a segment.

Padded batches, packed documents, a prefill with a cache, a sliding window: each is a few rectangles of queries and
keys, visible completely, below a diagonal, above one, or between two. A mask is converted to segments where it consists
of such; nothing is assumed about its origin: each of its elements is checked, once for all layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Segment(NamedTuple):
    """Consecutive queries, and the consecutive keys that they see.

    Counted from the first query and the first key, query a sees the existing keys from a + first to a + last.

    Attributes:
        rows: range of rows of the batch, [first, stop).
        queries: range of queries, [first, stop).
        keys: range of keys, [first, stop).
        first: offset of the first visible key; None: from the first key.
        last: offset of the last visible key; None: up to the last key.
        apart: position of the first query minus that of the first key.
        start: position of the first key; positions increase by one per token.
    """

    rows: tuple[int, int]
    queries: tuple[int, int]
    keys: tuple[int, int]
    first: int | None = None
    last: int | None = None
    apart: int = 0
    start: int = 0

    @property
    def distances(self) -> tuple[int, int]:
        """The minimum and maximum distance of a query from a visible key; negative if the key is ahead."""
        queries, keys = self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]
        least = self.apart - (keys - 1 if self.last is None else min(self.last, keys - 1))
        most = self.apart + queries - 1 if self.first is None else self.apart - self.first
        return least, most

    def seen_by(self, first: int, last: int) -> tuple[int, int]:
        """Return the range of keys that the queries `first` to `last` see, both as indices of the tensor."""
        low, high = self.keys
        if self.first is not None:
            low = max(low, self.keys[0] + first - self.queries[0] + self.first)
        if self.last is not None:
            high = min(high, self.keys[0] + last - self.queries[0] + self.last + 1)
        return low, high


def whole(batch: int, queries: int, keys: int, *, causal: bool) -> tuple[Segment, ...]:
    """Return the single segment of full attention, or of causal attention with as many keys as queries."""
    return (Segment((0, batch), (0, queries), (0, keys), last=0 if causal else None),)


class Tile(NamedTuple):
    """Queries and keys for one fused call.

    Attributes:
        kind: "full": each query sees each key; with as many keys as queries: "below": the n-th query sees the keys up
            to the n-th; "above": only those after it.
        queries: range of queries, [first, stop).
        keys: range of keys, [first, stop).
    """

    kind: Literal["full", "below", "above"]
    queries: tuple[int, int]
    keys: tuple[int, int]


def tiles(queries: tuple[int, int], keys: tuple[int, int], first: int | None, last: int | None) -> Iterator[Tile]:
    """Yield disjoint tiles that cover the keys a + first to a + last of each query a, counted from the first of each.

    Example:
        >>> [tile.kind for tile in tiles((0, 4), (0, 6), None, 2)]
        ['full', 'below']
        >>> [tuple(tile) for tile in tiles((0, 4), (0, 4), -1, 0)]
        [('below', (0, 2), (0, 2)), ('below', (2, 4), (2, 4)), ('above', (2, 4), (0, 2))]
    """
    count, width = queries[1] - queries[0], keys[1] - keys[0]
    if count <= 0 or width <= 0:
        return
    first = None if first is None or first <= 1 - count else first
    last = None if last is None or last >= width - 1 else last
    if first is None and last is None:
        yield Tile("full", queries, keys)
    elif first is None:
        assert last is not None
        yield from _up_to(queries, keys, last)
    elif last is None:
        yield from _beyond(queries, keys, first - 1)
    else:
        yield from _between(queries, keys, first, last)


def _up_to(queries: tuple[int, int], keys: tuple[int, int], last: int) -> Iterator[Tile]:
    """Yield tiles for the keys up to a + `last`."""
    (start, stop), (low, high) = queries, keys
    if last < 0:
        start, last = start - last, 0
    if start >= stop or low >= high:
        return
    if last > 0:
        yield Tile("full", (start, stop), (low, min(low + last, high)))
        low += last
    side = min(stop - start, high - low)
    if side > 0:
        yield Tile("below", (start, start + side), (low, low + side))
        if start + side < stop:
            yield Tile("full", (start + side, stop), (low, high))


def _beyond(queries: tuple[int, int], keys: tuple[int, int], before: int) -> Iterator[Tile]:
    """Yield tiles for the keys after a + `before`."""
    (start, stop), (low, high) = queries, keys
    if before < 0:
        some = min(start - before, stop)
        if low < high:
            yield Tile("full", (start, some), keys)
        start, before = some, 0
    low += before
    if start >= stop or low >= high:
        return
    side = min(stop - start, high - low)
    if side > 1:
        yield Tile("above", (start, start + side), (low, low + side))
    if low + side < high:
        yield Tile("full", (start, stop), (low + side, high))


def _between(queries: tuple[int, int], keys: tuple[int, int], first: int, last: int) -> Iterator[Tile]:
    """Yield tiles for the keys from a + `first` to a + `last`, in chunks of as many queries as visible keys.

    The first query of a chunk sees one key of its chunk of keys, and all except the first of the previous chunk; each
    next query sees one more key of its chunk, and one less of the previous one.
    """
    width = last - first + 1
    if width < 1:
        return
    (start, stop), (low, high) = queries, keys
    for begin in range(start, stop, width):
        end, chunk_keys = min(begin + width, stop), low + begin - start + last
        bottom, top = max(chunk_keys, low), min(chunk_keys + end - begin, high)
        if bottom < top:
            yield from _up_to((begin, end), (bottom, top), chunk_keys - bottom)
        bottom, top = max(chunk_keys - width, low), min(chunk_keys, high)
        if bottom < top:
            yield from _beyond((begin, end), (bottom, top), chunk_keys - width - bottom)


MOST_SEGMENTS = 512
"""Maximum number of segments of a row: each needs at least one call."""
BLOCK = 256
"""Queries whose mask is checked at once on a CPU."""


def segments_of(mask: Tensor, batch: int, keys: int) -> tuple[Segment, ...] | None:
    """Return the segments of a mask, without positions; None if its queries see keys with gaps.

    Args:
        mask: bool (True: attend) or additive (0: attend; the lowest number, or -inf: do not), [B or 1, 1, Q, K] or with
            more keys, which are ignored.
        batch: B.
        keys: K.

    Example:
        >>> left_padded = torch.ones(4, 4, dtype=torch.bool).tril() & (torch.arange(4) > 0)
        >>> segments_of(left_padded[None, None], 1, 4)
        (Segment(rows=(0, 1), queries=(1, 4), keys=(1, 4), first=None, last=0, apart=0, start=0),)
    """
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[3] < keys or not mask.shape[2] or not keys:
        return None
    mask = mask[:, 0, :, :keys]
    mask = mask[:1] if mask.stride(0) == 0 else mask
    intervals = _intervals(mask)
    if intervals is None:
        return None
    segments: list[Segment] = []
    before: np.ndarray | None = None
    for row, of_row in enumerate(intervals):
        if before is not None and np.array_equal(before, of_row):
            segments = [s._replace(rows=(s.rows[0], row + 1)) if s.rows[1] == row else s for s in segments]
            continue
        before = of_row
        rows = (0, batch) if len(mask) == 1 else (row, row + 1)
        runs = list(islice(_runs(of_row[0], of_row[1], rows), MOST_SEGMENTS + 1))
        if len(runs) > MOST_SEGMENTS:
            return None
        segments += runs
    return tuple(segments)


def _intervals(mask: Tensor) -> np.ndarray | None:
    """Return the first key and the end of the keys [B, 2, Q] that queries of a mask [B, Q, K] see; None: with gaps.

    A query that sees nothing has the range (0, 0).
    """
    blocks = []
    on_cpu = mask.device.type == "cpu"
    for some in mask.split(BLOCK if on_cpu else mask.shape[1], dim=1):
        seen = _as_bool(some)
        if seen is None:
            return None
        bits = seen.contiguous().view(torch.uint8)  # [B, q, K]
        # numpy is much faster than torch on a CPU
        first = torch.from_numpy(bits.numpy().argmax(axis=2)) if on_cpu else bits.argmax(dim=2)
        changes = (bits[..., 1:] ^ bits[..., :-1]).sum(dim=2, dtype=torch.int32)
        blocks.append(torch.stack((first.int(), bits.sum(dim=2, dtype=torch.int32), changes)))
    first, count, changes = torch.cat(blocks, dim=2).cpu().numpy()  # [B, Q] each; another device is waited for once
    # an interval has a change at each end that is not an end of the mask
    edges = (first > 0).astype(int) + (first + count < mask.shape[2])
    if not ((changes == edges) | (count == 0)).all():
        return None
    return np.stack((first * (count > 0), (first + count) * (count > 0)), axis=1)


def _as_bool(mask: Tensor) -> Tensor | None:
    """Return which keys a mask [B, q, K] shows; None if it has other weights."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    seen = mask == 0
    hidden = mask <= torch.finfo(mask.dtype).min
    return seen if bool((seen | hidden).all()) else None


def _runs(first: np.ndarray, end: np.ndarray, rows: tuple[int, int]) -> Iterator[Segment]:
    """Yield the segments of a row, in each of which both bounds stay constant or increase by one per query."""
    steps = list(zip((first[1:] - first[:-1]).tolist(), (end[1:] - end[:-1]).tolist(), strict=True))
    low, high = first.tolist(), end.tolist()
    start = 0
    for query in range(1, len(low) + 1):
        continues = query < len(low) and high[query] and high[start] and set(steps[query - 1]) <= {0, 1}
        if continues and (query - start == 1 or steps[query - 1] == steps[start]):
            continue
        if high[start]:
            step = steps[start] if query - start > 1 else (0, 0)
            keys = low[start], high[query - 1]
            begins = 0 if step[0] else None
            ends = high[start] - 1 - low[start] if step[1] else None
            yield Segment(rows, (start, query), keys, begins, ends)
        start = query


def placed(segment: Segment, query: Tensor, key: Tensor) -> list[tuple[Segment, bool]]:
    """Return `segment` with its positions, split by rows if these differ, and whether they always increase by one.

    Args:
        segment: a segment of a mask.
        query: positions of all queries, [B or 1, Q].
        key: positions of all keys, [B or 1, K].
    """
    first, last = segment.rows
    if len(query) == len(key) == 1:
        last = first + 1
    results: list[tuple[Segment, bool]] = []
    for row in range(first, last):
        query_positions, key_positions = (x[row % len(x)] for x in (query, key))
        regular = rises(query_positions[slice(*segment.queries)]) and rises(key_positions[slice(*segment.keys)])
        start = int(key_positions[segment.keys[0]])
        located = segment._replace(
            rows=(row, row + 1), apart=int(query_positions[segment.queries[0]]) - start, start=start
        )
        if results and results[-1] == (located._replace(rows=results[-1][0].rows), regular) and regular:
            located = located._replace(rows=(results.pop()[0].rows[0], row + 1))
        results.append((located, regular))
    if last < segment.rows[1]:
        results = [(located._replace(rows=segment.rows), regular) for located, regular in results]
    return results


def rises(positions: Tensor) -> bool:
    """Return whether `positions` [N] increase by one per token.

    Example:
        >>> rises(torch.tensor([3, 4, 5])), rises(torch.tensor([0, 1, 0]))
        (True, False)
    """
    return bool((positions.diff() == 1).all())


def together(segments: list[Segment]) -> list[Segment]:
    """Merge `segments` of consecutive rows that are otherwise equal.

    Example:
        >>> together([Segment((0, 1), (0, 4), (0, 4)), Segment((1, 3), (0, 4), (0, 4))])
        [Segment(rows=(0, 3), queries=(0, 4), keys=(0, 4), first=None, last=None, apart=0, start=0)]
    """
    ordered = sorted(segments, key=lambda current: (current.queries, current.keys, current.rows))
    merged = ordered[:1]
    for previous, current in pairwise(ordered):
        if previous._replace(rows=current.rows) == current and merged[-1].rows[1] == current.rows[0]:
            merged[-1] = merged[-1]._replace(rows=(merged[-1].rows[0], current.rows[1]))
        else:
            merged.append(current)
    return merged
