"""Segments of attention: queries side by side that see keys side by side, and the plain calls that cover one.

A batch with padding, a row of packed documents, a prefill upon a cache, a sliding window: each is a few rectangles of
queries and keys, seen whole, below a diagonal, above one, or between two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple


class Segment(NamedTuple):
    """Queries side by side, and the keys side by side that they see.

    Counted from the first query and the first key, query a sees the keys a + first to a + last, as far as there are.

    Attributes:
        rows: of the batch: first, and the one after the last.
        queries: first, and the one after the last.
        keys: first, and the one after the last.
        first: None: from the first key on.
        last: None: up to the last key.
        apart: position of the first query less that of the first key.
        start: position of the first key; positions rise by one from token to token.
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
        """The least distance of a query from a key that it sees, and the largest; below 0 the key is ahead."""
        queries, keys = self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]
        least = self.apart - (keys - 1 if self.last is None else min(self.last, keys - 1))
        most = self.apart + queries - 1 if self.first is None else self.apart - self.first
        return least, most

    def seen_by(self, first: int, last: int) -> tuple[int, int]:
        """Return the keys that any of the queries `first` to `last`, counted in the tensor, sees, counted there."""
        low, high = self.keys
        if self.first is not None:
            low = max(low, self.keys[0] + first - self.queries[0] + self.first)
        if self.last is not None:
            high = min(high, self.keys[0] + last - self.queries[0] + self.last + 1)
        return low, high


def whole(batch: int, queries: int, keys: int, *, causal: bool) -> tuple[Segment, ...]:
    """Return the one segment of an attention in which all is seen, or, of as many keys, what is not ahead."""
    return (Segment((0, batch), (0, queries), (0, keys), last=0 if causal else None),)


class Tile(NamedTuple):
    """Queries and keys for one fused call.

    Attributes:
        kind: "full": each query sees each key; of as many keys as queries: "below": the n-th query sees the keys up to
            the n-th; "above": only those after it.
        queries: first, and the one after the last.
        keys: first, and the one after the last.
    """

    kind: Literal["full", "below", "above"]
    queries: tuple[int, int]
    keys: tuple[int, int]


def tiles(queries: tuple[int, int], keys: tuple[int, int], first: int | None, last: int | None) -> Iterator[Tile]:
    """Give calls that cover what query a sees: the keys a + first to a + last, counted from the first of each; once.

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
    """Give calls for the keys up to a + `last`."""
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
    """Give calls for the keys after a + `before`."""
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
    """Give calls for the keys from a + `first` to a + `last`: in chunks of queries as long as there are such keys.

    The first query of a chunk sees one key of its own chunk of keys, and all but the first of the chunk before; each
    next query one more of its own, and one less of the one before.
    """
    width = last - first + 1
    if width < 1:
        return
    (start, stop), (low, high) = queries, keys
    for begin in range(start, stop, width):
        end, own = min(begin + width, stop), low + begin - start + last
        bottom, top = max(own, low), min(own + end - begin, high)
        if bottom < top:
            yield from _up_to((begin, end), (bottom, top), own - bottom)
        bottom, top = max(own - width, low), min(own, high)
        if bottom < top:
            yield from _beyond((begin, end), (bottom, top), own - width - bottom)
