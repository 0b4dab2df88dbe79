"""Segments of attention: consecutive queries that see consecutive keys, and the plain calls that cover a segment.

Padded batches, packed documents, a prefill with a cache, a sliding window: each is a few rectangles of queries and
keys, visible completely, below a diagonal, above one, or between two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple


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
