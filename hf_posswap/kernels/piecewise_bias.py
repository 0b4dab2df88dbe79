"""A piecewise linear bias of distance relative to the query's position, computed for a few queries at a time: FIRE.

A network with one input and one hidden ReLU layer is linear between the points at which its units switch on or off. Its
input is the product of a function of distance and a factor of the query. So at one distance, the biases of a few
consecutive queries are linear in their factors, unless a unit switches there. The network is computed for the first and
the last of these queries, and interpolated between them; where a unit switches, it is computed for all of them.

As in `blockwise.HankelBias`, queries are reversed, so that the numbers of a query are a view of those of all distances.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_posswap.compat.torch_tensors import holds_values
from hf_posswap.kernels.blockwise import LEARNED_BLOCK, Block, attend, seen_distances
from hf_posswap.kernels.fused import bias_dtype
from hf_posswap.kernels.segments import Segment
from hf_posswap.utils.devices import without_autocast

ROWS = 192
"""Queries per call of the kernel: with fewer, it is slower."""
STEP = 32
"""Queries between two whose bias is computed; a divisor of that, and of `LEARNED_BLOCK`."""
DENSE = 2**19
"""Numbers of a dense bias that fit the processor's cache: they set the number of heads per call."""
KEPT = 2**21
"""Numbers that the layers of a forward share, 8 MiB of float32."""
FEATURES = 2**18
"""Numbers of the network's units that are materialized at once, unless one query has more."""
SLACK = 1e-5
"""Relative widening of the range of inputs: more than the rounding of float32."""


class PiecewiseBias(NamedTuple):
    """The bias f_h(x) at x = line(i - j) factor(i) >= 0, with f_h continuous and linear between knots.

    Between the knots n - 1 and n, f_h(x) = offsets[h, n] + slopes[h, n] x.

    Attributes:
        line: a function of the distances, [N], that does not fall as |distance| grows.
        factors: of the queries, [Q].
        knots: in ascending order, [U]; infinite: no knot.
        offsets: [H, U + 1].
        slopes: [H, U + 1].
        bends: slopes[:, n + 1] - slopes[:, n], [H, U].
    """

    line: Tensor
    factors: Tensor
    knots: Tensor
    offsets: Tensor
    slopes: Tensor
    bends: Tensor


MakePiecewise = Callable[[Tensor, Tensor], PiecewiseBias]
"""Computes the bias for distances [N], which rise by one, and positions of queries [Q]."""


def attend_piecewise(query: Tensor, key: Tensor, value: Tensor, bias: PiecewiseBlocks, *, scaling: float) -> Tensor:
    """Return attention [B, H, Q, D] with a piecewise linear bias.

    Args:
        query: [B, H, Q, D].
        key: [B, G, K, D].
        value: [B, G, K, D].
        bias: for such queries and keys, from `piecewise_blocks`.
        scaling: multiplies the scores.
    """
    return attend(query.flip(2), key, value, bias, scaling=scaling).flip(2)


def piecewise_blocks(query: Tensor, key: Tensor, make: MakePiecewise, segments: Sequence[Segment]) -> PiecewiseBlocks:
    """Return the bias for `attend_piecewise`; without gradients, for any number of calls of such shapes.

    Args:
        query: [B, H, Q, D].
        key: [B, G, K, D].
        make: computes the bias.
        segments: the visible keys, with their positions.
    """
    margin = ROWS - 1  # a block also has pairs that are masked
    least, most = seen_distances(segments)
    distances = torch.arange(least - margin, most + margin + 1, device=query.device)
    positions = torch.cat([_positions(segment, query.device) for segment in segments])
    with without_autocast(query):
        return PiecewiseBlocks(query, key, make(distances, positions), most + margin, segments)


def _positions(segment: Segment, device: torch.device) -> Tensor:
    """Return the positions of the queries of `segment`."""
    first = segment.start + segment.apart
    return torch.arange(first, first + segment.queries[1] - segment.queries[0], device=device)


class _Place(NamedTuple):
    """Where a block is. No two blocks of a call with the same keys are at the same place.

    Attributes:
        line: the index of the first query's and the first key's number in the line.
        factor: the index of the first query's factor.
    """

    line: int
    factor: int


class _Values(NamedTuple):
    """The bias of a block at some queries, and at some distances.

    Attributes:
        ends: of every `STEP`-th query and of the last at all distances, [H, E + 1, W].
        weights: of the second of the two queries around each, [E, STEP, 1].
        bent: [H, STEP, N], where it is not linear between two queries.
        columns: their places, [N], each in the `STEP` queries' bias by distance.
    """

    ends: Tensor
    weights: Tensor
    bent: Tensor | None
    columns: Tensor | None


class _Changes(NamedTuple):
    """The gradients of the tensors of these names."""

    line: Tensor
    factors: Tensor
    offsets: Tensor
    slopes: Tensor


class PiecewiseBlocks:
    """A piecewise linear bias in blocks, with its gradients, for reversed queries.

    Args:
        query: [B, H, Q, D].
        key: [B, G, K, D].
        bias: of consecutive distances, and of the queries of all segments in their order.
        farthest: the last of the distances.
        segments: the visible keys.
    """

    def __init__(
        self, query: Tensor, key: Tensor, bias: PiecewiseBias, farthest: int, segments: Sequence[Segment]
    ) -> None:
        dtype = bias_dtype(query.dtype)
        # the farthest distance first, and the last query
        # f is continuous: all of its change is that of the pieces, none that of the knots
        learned = bias.line.flip(0), bias.factors.flip(0), bias.offsets, bias.slopes
        self.parameters: tuple[Tensor, ...] = tuple(tensor.to(dtype) for tensor in learned)
        line, factors, offsets, slopes = (x.detach() for x in self.parameters)
        knots, bends = bias.knots.detach().to(dtype), bias.bends.detach().to(dtype)
        self.bias = PiecewiseBias(line, factors, knots, offsets, slopes, bends)
        self.dense: Tensor
        self.learned = torch.is_grad_enabled() and any(x.requires_grad for x in self.parameters)
        self.farthest, self.segments, self.length = farthest, segments, query.shape[2]
        self.share = query.shape[1] // key.shape[1]
        self.lowest = torch.finfo(query.dtype).min
        self.places: dict[tuple[int, int], _Place] = {}
        self.changes: _Changes | None = None
        self.reused, self.left = not torch.is_grad_enabled(), KEPT
        self.kept: dict[_Place, _Values] = {}
        self.values: _Values | None = None
        self.known = holds_values(self.bias.knots)
        longest = max(segment.queries[1] - segment.queries[0] for segment in segments)
        self.rows = min(ROWS, -(-longest // STEP) * STEP)
        self.written_out = False
        self._free_buffers()

    def blocks(self) -> Iterator[Block]:
        self._make_buffers()
        after = len(self.bias.factors)  # the end of the segment's factors
        for segment in self.segments:
            first, end = segment.queries
            for start in range(first, end, self.rows):
                stop = min(start + self.rows, end)
                low, high = segment.seen_by(start, stop - 1)
                if low >= high:
                    continue
                queries = slice(self.length - stop, self.length - start)
                # of the last query, the first of the reversed ones, from the first key
                distance = segment.apart + stop - 1 - first - (low - segment.keys[0])
                place = _Place(self.farthest - distance, after - (stop - first))
                self.places[segment.rows[0], queries.start] = place
                self.values = self._values_of(place, stop - start, high - low, segment)
                for heads in self._head_ranges(high - low):
                    yield Block(slice(*segment.rows), queries, slice(low, high), heads)
            after -= end - first
        if not self.reused:
            self._free_buffers()
        if self.learned:  # the next pass is the backward, which materializes the scores
            self.rows, self.written_out = min(LEARNED_BLOCK, self.rows), True

    def _head_ranges(self, keys: int) -> Iterator[slice]:
        """Yield the heads of each call: of some groups, or some of one group's."""
        heads = len(self.bias.offsets)
        step = heads if self.written_out else max(1, DENSE // (self.rows * keys))
        if step >= self.share:
            step -= step % self.share
        else:
            step = max(n for n in range(1, step + 1) if self.share % n == 0)
        for start in range(0, heads, step):
            yield slice(start, min(start + step, heads))

    def _values_of(self, place: _Place, rows: int, keys: int, segment: Segment) -> _Values:
        """Return what the bias of a block of `rows` queries is interpolated from; the first blocks' is kept."""
        values = self.kept.get(place)
        if values is None:
            values = self._compute(place, rows, keys, segment)
            size = sum(x.numel() for x in values if x is not None)
            if self.reused and size <= self.left:
                self.left -= size
                self.kept[place] = values
        return values

    def _make_buffers(self) -> None:
        """Allocate what the passes over the blocks need."""
        if self.dense.numel():
            return
        line, (heads, units) = self.bias.line, self.bias.bends.shape
        keys = max(segment.keys[1] - segment.keys[0] for segment in self.segments)
        padded = self.rows * (keys + STEP)
        most = heads * padded if self.written_out else max(padded, 2 * DENSE, heads * self.rows * 2 * STEP)
        self.dense = line.new_empty(min(heads * padded, most))
        of_query = (2 + units) * (keys + self.rows)
        self.features = line.new_empty(max(FEATURES, (self.rows // STEP + 1) * of_query))
        if self.known:
            by_distance, by_query, knots = (x.tolist() for x in (line, self.bias.factors, self.bias.knots))
            self.numbers = by_distance, by_query, knots
            zero = self.farthest  # the index of distance 0
            # by distance from 0 on, or from the nearest on, of keys that are behind and ahead
            self.behind = by_distance[min(zero, len(by_distance) - 1) :: -1] if zero >= 0 else []
            self.ahead = by_distance[max(zero, 0) :]

    def _free_buffers(self) -> None:
        """Free them: a graph may keep this object until its backward."""
        self.dense = self.features = self.bias.line.new_empty(0)
        none: list[float] = []
        self.numbers, self.behind, self.ahead, self.values = (none, none, none), none, none, None
        self.coefficients: dict[tuple[int, int], Tensor] = {}

    def _compute(self, place: _Place, rows: int, keys: int, segment: Segment) -> _Values:
        """Return what the bias of a block of `rows` queries is interpolated from."""
        parts = -(-rows // STEP)
        width = keys + parts * STEP - 1
        line = self.bias.line[place.line : place.line + width]
        factors = self.bias.factors[place.factor : place.factor + rows]
        missing = parts * STEP - rows
        if missing:  # queries that are not there are as the last
            factors = torch.cat((factors, factors[-1:].expand(missing)))
        starts = factors[::STEP]
        ends = torch.cat((starts, factors[-1:]))
        units = self._units(place.line, width, place.factor, rows)
        values = self._evaluate(line, ends[:, None], units)  # [H, E + 1, W]
        # the segment shows a range of distances: the line index falls with the distance
        first = 0 if segment.first is None else self.farthest - (segment.apart - segment.first) - place.line
        last = width - 1 if segment.last is None else self.farthest - (segment.apart - segment.last) - place.line
        if first > 0:
            values[..., :first] = self.lowest
        if last < width - 1:
            values[..., last + 1 :] = self.lowest
        steps = (ends[1:] - starts)[:, None]
        by_part = factors.view(parts, STEP)
        weights = torch.where(steps == 0, 0.0, (by_part - starts[:, None]) / steps)[..., None]
        bent: list[int] = []
        counts: list[int] = []
        if self.known:
            for part in range(parts):
                columns = self._bent(place, part, rows, keys, units, (max(first, 0), min(last, width - 1)))
                bent += columns
                counts.append(len(columns))
        if not bent:
            return _Values(values, weights, None, None)
        at = torch.frombuffer(array("q", bent), dtype=torch.int64)
        part_of = torch.arange(parts).repeat_interleave(torch.tensor(counts))
        bent_line, bent_factors = line.index_select(0, at), by_part.T.contiguous().index_select(1, part_of)
        step = max(1, FEATURES // ((2 + units[1] - units[0]) * STEP))
        chunks = zip(bent_line.split(step), bent_factors.split(step, dim=1), strict=True)  # [n], [STEP, n]
        some = [self._evaluate(*chunk, units) for chunk in chunks]
        # by distance from the part's own first, a step to the next query is a step to the previous key
        columns_of = at - STEP * part_of + part_of * (STEP * (keys + STEP))
        return _Values(values, weights, some[0] if len(some) == 1 else torch.cat(some, dim=2), columns_of)

    def _bent(
        self, place: _Place, part: int, rows: int, keys: int, units: tuple[int, int], shown: tuple[int, int]
    ) -> list[int]:
        """Return the indices of the distances at which a unit switches between the first query of a part and the next.

        Distances are counted from the block's first; there may be others next to them.
        """
        _, by_query, knots = self.numbers
        start = part * STEP
        smallest = by_query[place.factor + start]
        largest = by_query[place.factor + min(start + STEP, rows - 1)]
        if smallest > largest:
            smallest, largest = largest, smallest
        if smallest == largest:
            return []
        low, high = max(start, shown[0]), min(start + keys + STEP - 2, shown[1])  # of this part
        zero = self.farthest - place.line  # the index of distance 0
        # the indices of the first numbers of these lists
        behind = zero - max(0, self.farthest - len(self.numbers[0]) + 1)
        ahead = zero + max(0, -self.farthest)
        some = [(knot / largest * (1 - SLACK), knot / smallest * (1 + SLACK)) for knot in knots[slice(*units)]]
        ranges: list[tuple[int, int]] = []
        if low <= behind:
            numbers, last = self.behind, behind + 1
            ranges += [(last - bisect_right(numbers, b), last - bisect_left(numbers, a)) for a, b in some]
        if high > ahead or zero < 0:
            numbers = self.ahead
            ranges += [(ahead + bisect_left(numbers, a), ahead + bisect_right(numbers, b)) for a, b in some]
        bent: list[int] = []
        for first, stop in sorted(ranges):
            if first > low:
                low = first
            if stop > high:
                stop = high + 1
            if low < stop:
                bent += range(low, stop)
                low = stop
        return bent

    def make(self, block: Block) -> Tensor:
        assert self.values is not None
        ends, weights, bent, columns = self.values
        rows, keys = block.queries.stop - block.queries.start, block.keys.stop - block.keys.start
        ends = ends[block.heads]
        heads, _, width = ends.shape
        parts, stride = len(weights), keys + STEP
        dense = self.dense[: heads * parts * STEP * stride].view(heads, parts, STEP, stride)
        shape, strides, offset = (heads, parts, STEP, keys), (ends.stride(0), width + STEP, 1, 1), ends.storage_offset()
        first, last = (ends.as_strided(shape, strides, offset + at) for at in (0, width))
        torch.lerp(first, last, weights, out=dense[..., :keys])
        if bent is not None and columns is not None:
            # of a part, a step to the next query is a step to the previous key
            total = parts * STEP * stride
            by_distance = dense.as_strided(
                (heads, STEP, total - (STEP - 1) * (stride - 1)), (total, stride - 1, 1), dense.storage_offset()
            )
            by_distance.index_copy_(2, columns, bent[block.heads])
        return dense.flatten(1, 2)[None, :, :rows, :keys]

    def _units(self, line: int, width: int, factor: int, count: int) -> tuple[int, int]:
        """Return how many knots are below, and how many not above, the inputs of `count` queries."""
        if not self.known:
            return 0, len(self.bias.knots)
        by_distance, by_query, knots = self.numbers
        ends, some = (by_distance[line], by_distance[line + width - 1]), by_query[factor : factor + count]
        smallest = by_distance[self.farthest] if line <= self.farthest < line + width else min(ends)
        low = bisect_left(knots, smallest * min(some) * (1 - SLACK))
        return low, bisect_right(knots, max(ends) * max(some) * (1 + SLACK), lo=low)

    def _evaluate(self, line: Tensor, factors: Tensor, units: tuple[int, int]) -> Tensor:
        """Return the bias [H, q, w] of the products of `line` [w] or [q, w] and `factors` [q, w or 1]."""
        shape = (2 + units[1] - units[0], len(factors), line.shape[-1])
        # 1, the inputs, and the larger of the input and each of the knots
        features = self.features[: shape[0] * shape[1] * shape[2]].view(shape)
        features[0].fill_(1.0)
        torch.mul(line, factors, out=features[1])
        if units[0] < units[1]:
            torch.maximum(features[1], self.bias.knots[slice(*units), None, None], out=features[2:])
        with without_autocast(line):
            values = torch.mm(self._coefficients(units), features.flatten(1))
        return values.unflatten(1, shape[1:])

    def _coefficients(self, units: tuple[int, int]) -> Tensor:
        """Return the factors of those features, [H, 2 + u]."""
        if units not in self.coefficients:
            (low, high), bias = units, self.bias
            parts = bias.offsets[:, high : high + 1], bias.slopes[:, low : low + 1], bias.bends[:, low:high]
            self.coefficients[units] = torch.cat(parts, dim=1)
        return self.coefficients[units]

    def gradient(self, change: Tensor, block: Block) -> None:
        assert self.values is not None
        place, columns = self.places[block.rows.start, block.queries.start], self.values.columns
        _, heads, rows, keys = change.shape
        stride = keys + STEP
        if self.changes is None:
            self.changes = _Changes(*(torch.zeros_like(x) for x in self.parameters))
        # pad rows by STEP, then re-read with rows shorter by one: each row shifts one further to the right
        padded = self.dense[: heads * rows * stride].view(heads, rows, stride)  # the block's bias is no longer needed
        padded[..., keys:].zero_()
        padded[..., :keys] = change[0]
        for other in change[1:]:
            padded[..., :keys] += other
        starts = range(0, rows, STEP)
        if columns is not None:  # in ascending order
            ends = torch.tensor([start * stride for start in (*starts, starts[-1] + STEP)])
            bounds = torch.searchsorted(columns, ends).tolist()
        for part, start in enumerate(starts):
            count = min(STEP, rows - start)
            shape, strides = (heads, count, stride - 1), (rows * stride, stride - 1, 1)
            by_distance = padded.as_strided(shape, strides, padded.storage_offset() + start * stride)
            at = _Place(place.line + start, place.factor + start)
            if columns is not None:
                some = columns[bounds[part] : bounds[part + 1]] - start * stride
                self._accumulate_pairs(by_distance.index_select(2, some), some, at)
                by_distance.index_fill_(2, some, 0.0)
            self._accumulate(by_distance, at)

    def _accumulate(self, change: Tensor, at: _Place) -> None:
        """Add the gradients by `change` [H, q, W] of queries, where no unit switches between those of a distance."""
        assert self.changes is not None
        to, (heads, queries, distances) = self.changes, change.shape
        lines, places = slice(at.line, at.line + distances), slice(at.factor, at.factor + queries)
        line, factors = self.bias.line[lines], self.bias.factors[places]
        pieces = torch.searchsorted(self.bias.knots, line * factors[0])  # [W]
        slopes = self.bias.slopes.index_select(1, pieces)  # [H, W]
        both = torch.stack((torch.ones_like(factors), factors)).expand(heads, -1, -1)
        constant, linear = torch.bmm(both, change).unbind(dim=1)  # [H, W]
        to.offsets.index_add_(1, pieces, constant)
        to.slopes.index_add_(1, pieces, linear * line)
        to.line[lines] += (linear * slopes).sum(dim=0)
        weights = (slopes * line)[:, None]  # from the left: CPUs are slower the other way round
        to.factors[places] += torch.bmm(weights, change.transpose(1, 2)).sum(dim=(0, 1))

    def _accumulate_pairs(self, change: Tensor, columns: Tensor, at: _Place) -> None:
        """Add the gradients by `change` [H, q, N] of queries and the distances `columns`, wherever units switch."""
        assert self.changes is not None
        to, places = self.changes, slice(at.factor, at.factor + change.shape[1])
        line, factors = self.bias.line[at.line + columns], self.bias.factors[places, None]
        inputs = line * factors  # [q, N]
        pieces = torch.searchsorted(self.bias.knots, inputs).flatten()
        to.offsets.index_add_(1, pieces, change.flatten(1))
        to.slopes.index_add_(1, pieces, (change * inputs).flatten(1))
        of_inputs = (change * self.bias.slopes.index_select(1, pieces).view(change.shape)).sum(dim=0)  # [q, N]
        to.line.index_add_(0, at.line + columns, (of_inputs * factors).sum(dim=0))
        to.factors[places] += (of_inputs * line).sum(dim=1)

    def gradients(self) -> tuple[Tensor | None, ...]:
        if self.changes is None:  # no block
            return (None,) * len(self.parameters)
        changes, self.changes = self.changes, None
        return changes
