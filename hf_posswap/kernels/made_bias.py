"""Any bias, with any mask, made for a few queries at a time: FIRE, and all biases of padded or packed batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hf_posswap.kernels.blockwise import attend
from hf_posswap.kernels.fused import bias_dtype

PAIRS = 2**17
"""Pairs of a query and a key, in all rows of a batch, whose bias is there at once."""
LEAST_ROWS = 32
"""Queries, in all rows of a batch, taken at once at least: each time all keys and values are read again."""

Make = Callable[[slice, slice], Tensor]
"""The bias of a range of queries to a range of keys, [1 or B, H, q, k]."""


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
    """
    bias = MadeBias(query, key, make, parameters, mask, causal and mask is None)
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
        self, query: Tensor, key: Tensor, make: Make, parameters: Sequence[Tensor], mask: Tensor | None, causal: bool
    ) -> None:
        self.parameters = tuple(parameters)
        self.maker, self.mask, self.causal = make, mask, causal
        self.length, self.keys = query.shape[2], key.shape[2]
        self.rows = queries_at_once(self.keys, query.shape[0])
        self.dtype, self.lowest = bias_dtype(query.dtype), torch.finfo(query.dtype).min
        self.changes: list[Tensor | None] = [None] * len(self.parameters)

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        for start in range(0, self.length, self.rows):
            stop = min(start + self.rows, self.length)
            yield start, stop, min(stop, self.keys) if self.causal else self.keys

    def make(self, start: int, stop: int, keys: int) -> Tensor:
        bias = self.maker(slice(start, stop), slice(keys)).to(self.dtype)  # [1 or B, H, q, keys]
        if self.causal:
            later = torch.arange(keys, device=bias.device) > torch.arange(start, stop, device=bias.device)[:, None]
            return bias.masked_fill(later, self.lowest)
        if self.mask is None:
            return bias
        mask = self.mask[..., start:stop, :keys]
        if mask.dtype == torch.bool:
            return bias.masked_fill(~mask, self.lowest)
        return (bias + mask).clamp(min=self.lowest)

    def gradient(self, change: Tensor, start: int, stop: int, keys: int) -> None:
        wanted = [n for n, parameter in enumerate(self.parameters) if parameter.requires_grad]
        with torch.enable_grad():
            bias = self.make(start, stop, keys)
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
