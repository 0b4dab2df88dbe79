"""Conversion of a mask to segments of consecutive queries that see consecutive keys; None for other masks.

Nothing is assumed about the mask's origin: each of its elements is checked, once for all layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_posswap.kernels.segments import Segment

MOST_SEGMENTS = 512
"""Maximum number of segments of a row: each needs at least one call."""
BLOCK = 256
"""Queries whose mask is checked at once."""


def segments_of(mask: Tensor, batch: int, keys: int) -> tuple[Segment, ...] | None:
    """Return the segments of a mask on a CPU, without positions; None if its queries see keys with gaps.

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
    one_row = len(mask) == 1
    segments: list[Segment] = []
    before: Any = None
    for row, seen in enumerate(mask):
        intervals = _intervals(seen)
        if intervals is None:
            return None
        rows = (0, batch) if one_row else (row, row + 1)
        if before is not None and all((a == b).all() for a, b in zip(before, intervals, strict=True)):
            segments = [s._replace(rows=(s.rows[0], row + 1)) if s.rows[1] == row else s for s in segments]
            continue
        before = intervals
        of_row = list(islice(_runs(*intervals, rows), MOST_SEGMENTS + 1))
        if len(of_row) > MOST_SEGMENTS:
            return None
        segments += of_row
    return tuple(segments)


def _intervals(mask: Tensor) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    """Return the range of keys, [first, stop), that each query of a mask [Q, K] sees; None if there are gaps.

    A query that sees nothing has the range (0, 0).
    """
    firsts, ends = [], []
    for some in mask.split(BLOCK):
        seen = _as_bool(some)
        if seen is None:
            return None
        bits = seen.contiguous().view(torch.uint8)  # [q, K]
        count = bits.sum(dim=1, dtype=torch.int32).numpy()
        first = bits.numpy().argmax(axis=1)  # much faster than torch's
        changes = (bits[:, 1:] ^ bits[:, :-1]).sum(dim=1, dtype=torch.int32).numpy()
        # an interval has a change at each end that is not an end of the mask
        edges = (first > 0).astype(int) + (first + count < bits.shape[1])
        if not ((changes == edges) | (count == 0)).all():
            return None
        firsts.append(first * (count > 0))
        ends.append((first + count) * (count > 0))
    return np.concatenate(firsts), np.concatenate(ends)


def _as_bool(mask: Tensor) -> Tensor | None:
    """Return which keys a mask [q, K] shows; None if it has other weights."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    seen = mask == 0
    hidden = mask <= torch.finfo(mask.dtype).min
    return seen if bool((seen | hidden).all()) else None


def _runs(first: Any, end: Any, rows: tuple[int, int]) -> Iterator[Segment]:
    """Yield the segments of a row, in each of which both bounds stay constant or increase by one per query."""
    steps = list(zip((first[1:] - first[:-1]).tolist(), (end[1:] - end[:-1]).tolist(), strict=True))
    low, high = first.tolist(), end.tolist()
    start = 0
    for query in range(1, len(low) + 1):
        continues = query < len(low) and high[query] and high[start] and set(steps[query - 1]) <= {0, 1}
        if continues and (query - start == 1 or steps[query - 1] == steps[start]):
            continue
        if high[start]:
            yield _segment(low, high, start, query, steps[start] if query - start > 1 else (0, 0), rows)
        start = query


def _segment(
    low: list[int], high: list[int], start: int, stop: int, step: tuple[int, int], rows: tuple[int, int]
) -> Segment:
    keys = low[start], high[stop - 1]
    first = 0 if step[0] else None
    last = high[start] - 1 - low[start] if step[1] else None
    return Segment(rows, (start, stop), keys, first, last)


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
