"""Attention with a bias that is computed for one block of queries at a time, forward and backward.

For a learned bias, the backward recomputes each block's scores and passes the gradient of the bias to its owner, so
that no [Q, K] tensor outlives a block. Otherwise a fused backward is used. Dao et al. 2022,
https://arxiv.org/abs/2205.14135, appendix B.4.

There are two such biases. `MadeBias` is any bias with any mask, computed for a few queries at a time: FIRE, and all
biases of padded or packed batches. `HankelBias` depends on distance alone: T5, KERPLE, ALiBi. With the numbers of all
distances in a line, the farthest first, the bias of a reversed block of queries is a Hankel matrix: a view of the line
in which a step to the next query equals a step to the next key. So [H, Q, K] is never materialized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_posswap.kernels import fused
from hf_posswap.kernels.fused import bias_dtype
from hf_posswap.kernels.segments import Segment, whole
from hf_posswap.utils.devices import without_autocast

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

    class _Context(FunctionCtx):
        """What the forward keeps for the backward."""

        saved_tensors: tuple[Tensor, ...]
        needs_input_grad: tuple[bool, ...]
        bias: BlockBias
        scaling: float


class Block(NamedTuple):
    """A block of queries of some heads, and a range of keys that contains all visible ones.

    With grouped heads, `heads` are those of some groups, or some of one group's.
    """

    rows: slice
    queries: slice
    keys: slice
    heads: slice = slice(None)

    def indices(self, share: int) -> tuple[tuple[slice, slice, slice], tuple[slice, slice, slice]]:
        """Return the indices of the queries and of the keys, if `share` heads share a key."""
        groups = self.heads
        if groups != slice(None):
            groups = slice(groups.start // share, -(-groups.stop // share))
        return (self.rows, self.heads, self.queries), (self.rows, groups, self.keys)


class BlockBias(Protocol):
    """Computes the bias of a block of queries, and accumulates its gradient."""

    parameters: tuple[Tensor, ...]
    """The tensors that the bias depends on, which may need gradients."""

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks. Each query of a head is in at most one; one in none attends to nothing and outputs zero."""

    def make(self, block: Block) -> Tensor:
        """Return the bias of a block, [1 or b, h, q, k]; -inf, or the lowest number, masks."""

    def gradient(self, change: Tensor, block: Block) -> None:
        """Accumulate the gradient of the result of `make`, [b, h, q, k]."""

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Return the accumulated gradients of `parameters`."""


def attend(query: Tensor, key: Tensor, value: Tensor, bias: BlockBias, *, scaling: float) -> Tensor:
    """Return attention [B, H, Q, D] with a bias that includes the mask.

    Args:
        query: [B, H, Q, D].
        key: [B, G, K, D].
        value: [B, G, K, D].
        bias: computed block by block, only for this call.
        scaling: multiplies the scores.
    """
    return _Blockwise.apply(bias, scaling, query, key, value, *bias.parameters)


class _Blockwise(torch.autograd.Function):
    """`attend`, with its gradients."""

    @staticmethod
    def forward(
        ctx: _Context,
        bias: BlockBias,
        scaling: float,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        batch, heads, length, width = query.shape
        # memory layout for the following layer
        whole = query.new_zeros(batch, length, heads, width).transpose(1, 2)
        total = torch.zeros(query.shape[:3], dtype=fused.bias_dtype(query.dtype), device=query.device)
        for block in bias.blocks():
            query_index, key_index = block.indices(query.shape[1] // key.shape[1])
            whole[query_index], total[query_index] = fused.forward(
                query[query_index],
                key[key_index],
                value[key_index],
                scaling=scaling,
                causal=False,
                bias=bias.make(block),
            )
        ctx.save_for_backward(query, key, value, whole, total, *parameters)
        ctx.bias, ctx.scaling = bias, scaling
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums, *_ = ctx.saved_tensors
        bias, learned = ctx.bias, any(ctx.needs_input_grad[5:])
        grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for block in bias.blocks():
            query_index, key_index = block.indices(query.shape[1] // key.shape[1])
            arguments = (
                grad[query_index],
                query[query_index],
                key[key_index],
                value[key_index],
                out[query_index],
                sums[query_index],
            )
            block_bias = bias.make(block)
            if learned:
                with without_autocast(query):
                    *block_grads, change = written_out(*arguments, scaling=ctx.scaling, bias=block_bias)
                    bias.gradient(change, block)
            else:
                block_grads = list(fused.backward(*arguments, scaling=ctx.scaling, causal=False, bias=block_bias))
            for grad_sum, block_grad, span in zip(grads, block_grads, (query_index, key_index, key_index), strict=True):
                grad_sum[span] += block_grad
        return None, None, *grads, *(bias.gradients() if learned else (None,) * len(bias.parameters))


NEGLIGIBLE = 1e-30
"""Weight that counts as 0 where gradients are written out."""


def written_out(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, *, scaling: float, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and of the bias [B, H, Q, K], from recomputed scores."""
    groups = key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)

    def by_group(x: Tensor) -> Tensor:  # [B, G, H/G Q, D]
        return x.unflatten(1, (groups, -1)).flatten(2, 3).to(wide)

    queries, rows = by_group(query) * scaling, by_group(grad)
    keys, values = key.to(wide), value.to(wide)
    scores = torch.matmul(queries, keys.transpose(-1, -2))  # [B, G, H/G Q, K]
    shape = (*query.shape[:3], key.shape[2])
    probabilities = scores.view(shape).add_(bias).sub_(sums[..., None]).exp_()  # [B, H, Q, K]
    torch.threshold_(probabilities, NEGLIGIBLE, 0.0)  # CPUs are slow with numbers that are almost 0
    heads = probabilities.view(scores.shape)
    to_value = torch.matmul(heads.transpose(-1, -2), rows)
    delta = (grad.to(wide) * out.to(wide)).sum(dim=-1, keepdim=True)  # [B, H, Q, 1]
    bias_grad = torch.matmul(rows, values.transpose(-1, -2)).view(shape).sub_(delta).mul_(probabilities)
    by_head = bias_grad.view(scores.shape)
    to_query = torch.matmul(by_head, keys).mul_(scaling).view(query.shape)
    to_key = torch.matmul(by_head.transpose(-1, -2), queries)
    return to_query.to(query.dtype), to_key.to(key.dtype), to_value.to(value.dtype), bias_grad


PAIRS = 2**17
"""Query-key pairs, over all rows of a batch, whose bias is materialized at once."""
LEAST_ROWS = 32
"""Minimum number of queries per block, over all rows of a batch, because each block reads all keys and values."""

Make = Callable[[slice, slice, slice], Tensor]
"""Computes the bias of a range of rows, queries and keys, [1 or b, H, q, k]."""


def attend_made(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    make: Make,
    parameters: Sequence[Tensor],
    mask: Tensor | None,
    *,
    scaling: float,
    causal: bool,
    segments: Sequence[Segment] | None = None,
) -> Tensor:
    """Return attention [B, H, Q, D] with the bias that `make` computes.

    Args:
        query: [B, H, Q, D].
        key: [B, G, K, D].
        value: [B, G, K, D].
        make: computes the bias.
        parameters: tensors that `make` uses, which may need gradients.
        mask: bool (True: attend) or additive, [B or 1, 1 or H, Q, K]; None: only causality.
        scaling: multiplies the scores.
        causal: without a mask: whether query i sees only keys up to i.
        segments: the visible keys, instead of mask and causality; None: use those.
    """
    masked = mask is not None and segments is None
    if segments is None:
        segments = whole(query.shape[0], query.shape[2], key.shape[2], causal=causal and not masked)
    bias = MadeBias(query, make, parameters, mask if masked else None, segments)
    return attend(query, key, value, bias, scaling=scaling)


def queries_at_once(keys: int, batch: int = 1) -> int:
    """Return the number of queries of each row whose bias to `keys` keys is materialized at once.

    Example:
        >>> queries_at_once(2048), queries_at_once(32768)
        (64, 32)
    """
    return max(1, PAIRS // (keys * batch), LEAST_ROWS // batch)


class MadeBias:
    """The bias of a few queries, computed on demand, and recomputed for its gradient."""

    def __init__(
        self, query: Tensor, make: Make, parameters: Sequence[Tensor], mask: Tensor | None, segments: Sequence[Segment]
    ) -> None:
        self.parameters = tuple(parameters)
        self.maker, self.mask, self.segments = make, mask, segments
        self.dtype, self.lowest = bias_dtype(query.dtype), torch.finfo(query.dtype).min
        self.changes: list[Tensor | None] = [None] * len(self.parameters)
        self.of: dict[tuple[int, int], Segment] = {}

    def blocks(self) -> Iterator[Block]:
        for segment in self.segments:
            batch = segment.rows[1] - segment.rows[0]
            step = queries_at_once(segment.keys[1] - segment.keys[0], batch)
            for start in range(*segment.queries, step):
                stop = min(start + step, segment.queries[1])
                low, high = segment.seen_by(start, stop - 1)
                if low < high:
                    self.of[segment.rows[0], start] = segment
                    yield Block(slice(*segment.rows), slice(start, stop), slice(low, high))

    def make(self, block: Block) -> Tensor:
        bias = self.maker(block.rows, block.queries, block.keys).to(self.dtype)  # [1 or b, H, q, k]
        if self.mask is not None:
            mask = self.mask if len(self.mask) == 1 else self.mask[block.rows]
            mask = mask[..., block.queries, block.keys]
            if mask.dtype == torch.bool:
                return bias.masked_fill(~mask, self.lowest)
            return (bias + mask).clamp(min=self.lowest)
        segment = self.of[block.rows.start, block.queries.start]
        # offset of each key from the key at the query's index in the segment
        ahead = (
            torch.arange(block.keys.start - segment.keys[0], block.keys.stop - segment.keys[0], device=bias.device)
            - torch.arange(
                block.queries.start - segment.queries[0], block.queries.stop - segment.queries[0], device=bias.device
            )[:, None]
        )
        if segment.last is not None:
            bias = bias.masked_fill(ahead > segment.last, self.lowest)
        return bias if segment.first is None else bias.masked_fill(ahead < segment.first, self.lowest)

    def gradient(self, change: Tensor, block: Block) -> None:
        indices = [n for n, parameter in enumerate(self.parameters) if parameter.requires_grad]
        with torch.enable_grad():
            bias = self.make(block)
        grads = torch.autograd.grad(
            bias, [self.parameters[n] for n in indices], change.sum_to_size(bias.shape).to(bias.dtype),
            allow_unused=True,
        )  # fmt: skip
        for n, grad in zip(indices, grads, strict=True):
            accumulated = self.changes[n]
            self.changes[n] = grad if accumulated is None or grad is None else accumulated + grad

    def gradients(self) -> tuple[Tensor | None, ...]:
        grads, self.changes = tuple(self.changes), [None] * len(self.parameters)
        return grads


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
        total = change[0] if len(change) == 1 else change.sum(dim=0)
        skewed = torch.nn.functional.pad(total, (0, rows)).flatten(1)[:, : rows * (keys + rows - 1)]
        at = self._offset(block)
        self.change[:, at : at + keys + rows - 1] += skewed.unflatten(1, (rows, -1)).sum(dim=1)

    def gradients(self) -> tuple[Tensor | None, ...]:
        change, self.change = self.change, None
        return (change,)
