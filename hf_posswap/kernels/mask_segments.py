"""A mask read as segments: which queries side by side see which keys side by side; None where it is no such mask.

Nothing is taken for granted of where a mask came from: each of its numbers is looked at, once for all layers.
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
"""Segments of a row up to which its mask is taken apart: each needs a call or more."""
BLOCK = 256
"""Queries whose mask is looked at in one go."""


def segments_of(mask: Tensor, batch: int, keys: int) -> tuple[Segment, ...] | None:
    """Return the segments of a mask on a CPU, without positions; None: its queries see keys with gaps between them.

    Args:
        mask: bool (True: attend) or additive (0: attend; the lowest number, or -inf: do not), [B or 1, 1, Q, K] or with
            more keys, which are left out.
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
    found: list[Segment] = []
    before: Any = None
    for row, seen in enumerate(mask):
        intervals = _intervals(seen)
        if intervals is None:
            return None
        rows = (0, batch) if one_row else (row, row + 1)
        if before is not None and all((a == b).all() for a, b in zip(before, intervals, strict=True)):
            found = [one._replace(rows=(one.rows[0], row + 1)) if one.rows[1] == row else one for one in found]
            continue
        before = intervals
        of_row = list(islice(_runs(*intervals, rows), MOST_SEGMENTS + 1))
        if len(of_row) > MOST_SEGMENTS:
            return None
        found += of_row
    return tuple(found)


def _intervals(mask: Tensor) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    """Return the first key that each query of a mask [Q, K] sees, and the one after the last; None: there are gaps.

    A query that sees nothing has two zeros.
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
        # of an interval only its two ends are changes, unless they are the mask's
        edges = (first > 0).astype(int) + (first + count < bits.shape[1])
        if not ((changes == edges) | (count == 0)).all():
            return None
        firsts.append(first * (count > 0))
        ends.append((first + count) * (count > 0))
    return np.concatenate(firsts), np.concatenate(ends)


def _as_bool(mask: Tensor) -> Tensor | None:
    """Return which keys a mask [q, K] shows; None: it weighs them."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    seen = mask == 0
    hidden = mask <= torch.finfo(mask.dtype).min
    return seen if bool((seen | hidden).all()) else None


def _runs(first: Any, end: Any, rows: tuple[int, int]) -> Iterator[Segment]:
    """Give the segments of a row, in each of which both bounds stand still, or go on by one from query to query."""
    steps = list(zip((first[1:] - first[:-1]).tolist(), (end[1:] - end[:-1]).tolist(), strict=True))
    low, high = first.tolist(), end.tolist()
    start = 0
    for query in range(1, len(low) + 1):
        goes_on = query < len(low) and high[query] and high[start] and set(steps[query - 1]) <= {0, 1}
        if goes_on and (query - start == 1 or steps[query - 1] == steps[start]):
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
    """Return `segment` with its positions, cut into rows where those differ, and whether they rise by one all along.

    Args:
        segment: of a mask.
        query: positions of all queries, [B or 1, Q].
        key: positions of all keys, [B or 1, K].
    """
    first, last = segment.rows
    if len(query) == len(key) == 1:
        last = first + 1
    found: list[tuple[Segment, bool]] = []
    for row in range(first, last):
        asked, seen = (x[row % len(x)] for x in (query, key))
        regular = rises(asked[slice(*segment.queries)]) and rises(seen[slice(*segment.keys)])
        start = int(seen[segment.keys[0]])
        one = segment._replace(rows=(row, row + 1), apart=int(asked[segment.queries[0]]) - start, start=start)
        if found and found[-1] == (one._replace(rows=found[-1][0].rows), regular) and regular:
            one = one._replace(rows=(found.pop()[0].rows[0], row + 1))
        found.append((one, regular))
    if last < segment.rows[1]:
        found = [(one._replace(rows=segment.rows), regular) for one, regular in found]
    return found


def rises(positions: Tensor) -> bool:
    """Return whether `positions` [N] rise by one from token to token.

    Example:
        >>> rises(torch.tensor([3, 4, 5])), rises(torch.tensor([0, 1, 0]))
        (True, False)
    """
    return bool((positions.diff() == 1).all())


def together(segments: list[Segment]) -> list[Segment]:
    """Return `segments` with those that differ in their row alone, one row after the other, made one.

    Example:
        >>> together([Segment((0, 1), (0, 4), (0, 4)), Segment((1, 3), (0, 4), (0, 4))])
        [Segment(rows=(0, 3), queries=(0, 4), keys=(0, 4), first=None, last=None, apart=0, start=0)]
    """
    ordered = sorted(segments, key=lambda one: (one.queries, one.keys, one.rows))
    found = ordered[:1]
    for before, one in pairwise(ordered):
        if before._replace(rows=one.rows) == one and found[-1].rows[1] == one.rows[0]:
            found[-1] = found[-1]._replace(rows=(found[-1].rows[0], one.rows[1]))
        else:
            found.append(one)
    return found
