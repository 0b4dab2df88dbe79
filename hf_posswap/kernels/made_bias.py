"""Any bias with any mask, computed for a few queries at a time: FIRE, and all biases of padded or packed batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hf_posswap.kernels.blockwise import Block, attend
from hf_posswap.kernels.fused import bias_dtype
from hf_posswap.kernels.segments import Segment, whole

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
