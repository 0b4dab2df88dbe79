"""Any bias, with any mask, made for a few queries at a time: FIRE, and all biases of padded or packed batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hf_posswap.kernels.blockwise import Block, attend
from hf_posswap.kernels.fused import bias_dtype
from hf_posswap.kernels.segments import Segment, whole

PAIRS = 2**17
"""Pairs of a query and a key, in all rows of a batch, whose bias is there at once."""
LEAST_ROWS = 32
"""Queries, in all rows of a batch, taken at once at least: each time all keys and values are read again."""

Make = Callable[[slice, slice, slice], Tensor]
"""The bias, in a range of rows, of a range of queries to a range of keys, [1 or b, H, q, k]."""


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
    """Return attention [B, H, Q, D] with the bias that `make` gives on the scores.

    Args:
        query: [B, H, Q, D].
        key: [B, G, K, D].
        value: [B, G, K, D].
        make: gives the bias.
        parameters: that `make` uses, and that may need gradients.
        mask: bool (True: attend) or additive, [B or 1, 1 or H, Q, K]; None: nothing but causality masks.
        scaling: multiplies the scores.
        causal: where there is no mask: whether query i sees keys up to i only.
        segments: what is seen, in place of mask and causality; None: those tell it.
    """
    masked = mask is not None and segments is None
    if segments is None:
        segments = whole(query.shape[0], query.shape[2], key.shape[2], causal=causal and not masked)
    bias = MadeBias(query, make, parameters, mask if masked else None, segments)
    return attend(query, key, value, bias, scaling=scaling)


def queries_at_once(keys: int, batch: int = 1) -> int:
    """Return for how many queries of each row of a batch the bias to `keys` keys is there at once.

    Example:
        >>> queries_at_once(2048), queries_at_once(32768)
        (64, 32)
    """
    return max(1, PAIRS // (keys * batch), LEAST_ROWS // batch)


class MadeBias:
    """The bias of a few queries, made when it is needed, and once more for its gradient."""

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
        bias = self.maker(*block).to(self.dtype)  # [1 or b, H, q, k]
        if self.mask is not None:
            mask = self.mask if len(self.mask) == 1 else self.mask[block.rows]
            mask = mask[..., block.queries, block.keys]
            if mask.dtype == torch.bool:
                return bias.masked_fill(~mask, self.lowest)
            return (bias + mask).clamp(min=self.lowest)
        segment = self.of[block.rows.start, block.queries.start]
        # of each key from the key at the query's own place in the segment
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
        wanted = [n for n, parameter in enumerate(self.parameters) if parameter.requires_grad]
        with torch.enable_grad():
            bias = self.make(block)
        found = torch.autograd.grad(
            bias, [self.parameters[n] for n in wanted], change.sum_to_size(bias.shape).to(bias.dtype),
            allow_unused=True,
        )  # fmt: skip
        for n, more in zip(wanted, found, strict=True):
            before = self.changes[n]
            self.changes[n] = more if before is None or more is None else before + more

    def gradients(self) -> tuple[Tensor | None, ...]:
        found, self.changes = tuple(self.changes), [None] * len(self.parameters)
        return found
