"""A bias that depends on distance alone, as a view of one number for each distance: T5, KERPLE, ALiBi.

With the numbers of all distances in a line, the farthest first, the bias of a reversed block of queries is a Hankel
matrix: a view of the line in which a step to the next query equals a step to the next key. So [H, Q, K] is never
materialized.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_posswap.kernels.blockwise import Block, attend
from hf_posswap.kernels.fused import bias_dtype
from hf_posswap.kernels.segments import Segment, whole

BLOCK = 256
"""Queries per call."""
LEARNED_BLOCK = 128
"""Queries per call if the backward materializes the scores: fewer, so that they fit the processor's cache."""


def attend_by_distance(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    by_distance: Tensor,
    *,
    scaling: float,
    causal: bool = False,
    segments: Sequence[Segment] | None = None,
) -> Tensor:
    """Return attention [B, H, Q, D] with a bias by distance, the position of the query minus that of the key.

    Args:
        query: [B, H, Q, D].
        key: [B, G, K, D].
        value: [B, G, K, D].
        by_distance: [H, N], for the distances from `seen_distances(segments)[0]` to `seen_distances(segments)[1]`.
        scaling: multiplies the scores.
        causal: without segments: whether attention is causal, with as many keys as queries.
        segments: the visible keys, as accepted by `by_line`; None: all, or with `causal` those that are not ahead.
    """
    batch, _, length, _ = query.shape
    segments = segments or whole(batch, length, key.shape[2], causal=causal)
    dtype = bias_dtype(query.dtype)
    # -inf outside the visible distances, so the line also masks
    margin = min(BLOCK, length) - 1
    line = torch.nn.functional.pad(by_distance.to(dtype), (margin, margin), value=-torch.inf).flip(-1)
    farthest = seen_distances(segments)[1] + margin
    # queries are reversed for the view, and restored at the end
    out = attend(query.flip(2), key, value, HankelBias(line, farthest, segments, length), scaling=scaling)
    return out.flip(2)


def seen_distances(segments: Sequence[Segment]) -> tuple[int, int]:
    """Return the minimum and maximum distance of a query from a visible key.

    Example:
        >>> seen_distances(whole(1, 5, 5, causal=True)), seen_distances(whole(1, 5, 5, causal=False))
        ((0, 4), (-4, 4))
    """
    ranges = [segment.distances for segment in segments]
    return min(least for least, _ in ranges), max(most for _, most in ranges)


def by_line(segments: Sequence[Segment]) -> list[bool]:
    """Return for each segment whether the bounds of distance common to all segments describe its visible keys."""
    causal = [segment.apart - segment.last for segment in segments if segment.last is not None]
    windowed = [segment.apart - segment.first for segment in segments if segment.first is not None]
    least, most = min(causal, default=None), max(windowed, default=None)
    return [_has_bounds(segment, least, most) for segment in segments]


def _has_bounds(segment: Segment, least: int | None, most: int | None) -> bool:
    """Return whether a segment sees exactly its keys at distances from `least` to `most`."""
    nearest = segment.apart - (segment.keys[1] - segment.keys[0]) + 1
    farthest = segment.apart + segment.queries[1] - segment.queries[0] - 1
    near = (
        nearest >= least
        if segment.last is None and least is not None
        else segment.last is None or (segment.apart - segment.last == least)
    )
    far = (
        farthest <= most
        if segment.first is None and most is not None
        else segment.first is None or (segment.apart - segment.first == most)
    )
    return near and far


class HankelBias:
    """The bias of reversed queries: the n-th of the tensor is the (Q - 1 - n)-th of the text.

    Args:
        line: [H, N], the number of distance d at `farthest` - d.
        farthest: the distance of the first entry.
        segments: the visible keys.
        length: Q.
    """

    def __init__(self, line: Tensor, farthest: int, segments: Sequence[Segment], length: int) -> None:
        self.parameters: tuple[Tensor, ...] = (line,)
        self.line, self.farthest = line.detach().contiguous(), farthest
        self.segments, self.length = segments, length
        self.learned = line.requires_grad and torch.is_grad_enabled()
        self.change: Tensor | None = None
        self.offsets: dict[tuple[int, int, int], int] = {}

    def blocks(self) -> Iterator[Block]:
        step = LEARNED_BLOCK if self.learned else BLOCK
        for segment in self.segments:
            for stop in range(segment.queries[1], segment.queries[0], -step):
                start = max(stop - step, segment.queries[0])
                low, high = segment.seen_by(start, stop - 1)
                if low >= high:
                    continue
                rows, queries = slice(*segment.rows), slice(self.length - stop, self.length - start)
                # distance of the block's first query, the last one in the text, from its first key
                apart = segment.apart + stop - 1 - segment.queries[0] - (low - segment.keys[0])
                self.offsets[segment.rows[0], queries.start, low] = self.farthest - apart
                yield Block(rows, queries, slice(low, high))

    def make(self, block: Block) -> Tensor:
        heads, width = self.line.shape
        shape = (1, heads, block.queries.stop - block.queries.start, block.keys.stop - block.keys.start)
        return self.line.as_strided(shape, (0, width, 1, 1), self.line.storage_offset() + self._offset(block))

    def _offset(self, block: Block) -> int:
        return self.offsets[block.rows.start, block.queries.start, block.keys.start]

    def gradient(self, change: Tensor, block: Block) -> None:
        if self.change is None:
            self.change = torch.zeros_like(self.line)
        rows, keys = change.shape[-2:]
        # pad rows by `rows`, then re-read with rows shorter by one: each row shifts one further to the right
        skewed = torch.nn.functional.pad(change.sum(dim=0), (0, rows)).flatten(1)[:, : rows * (keys + rows - 1)]
        at = self._offset(block)
        self.change[:, at : at + keys + rows - 1] += skewed.unflatten(1, (rows, -1)).sum(dim=1)

    def gradients(self) -> tuple[Tensor | None, ...]:
        change, self.change = self.change, None
        return (change,)
