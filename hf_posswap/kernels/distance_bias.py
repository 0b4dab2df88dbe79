"""A bias that depends on distance alone, as a view of one number for each distance: T5, KERPLE, ALiBi.

With r[h, j - i + L - 1] in memory, the bias of a block of queries, taken backwards, is a Hankel matrix: a view of r in
which a step to the next query and a step to the next key are the same step. So [H, L, L] is never written.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hf_posswap.kernels.blockwise import attend
from hf_posswap.kernels.fused import bias_dtype

BLOCK = 256
"""Queries that are scored in one call."""
LEARNED_BLOCK = 128
"""The same where the backward writes the scores out: of fewer queries they stay in the processor's cache."""


def attend_by_distance(
    query: Tensor, key: Tensor, value: Tensor, by_distance: Tensor, *, scaling: float, causal: bool
) -> Tensor:
    """Return attention [B, H, L, D] of tokens at consecutive positions, with by_distance[h, i - j] on the scores.

    Args:
        query: [B, H, L, D].
        key: [B, G, L, D].
        value: [B, G, L, D].
        by_distance: [H, L] of the distances 0 to L - 1; where not causal, [H, 2 L - 1] of -(L - 1) to L - 1.
        scaling: multiplies the scores.
        causal: whether a query sees its past and itself only.
    """
    length = query.shape[2]
    dtype = bias_dtype(query.dtype)
    # [H, 2 L - 1], r[h, n] of the distance L - 1 - n: the future, where it is masked, is -inf
    line = by_distance.to(dtype).flip(-1)
    if causal:
        line = torch.nn.functional.pad(line, (0, length - 1), value=-torch.inf)
    # queries backwards, as the view has them; the order is put back at the end
    out = attend(query.flip(2), key, value, HankelBias(line, causal), scaling=scaling)
    return out.flip(2)


class HankelBias:
    """The bias of queries that are taken backwards: the n-th stands at L - 1 - n.

    Args:
        line: [H, 2 L - 1], the number of distance d at L - 1 - d.
        causal: whether keys after the first query of a block need not be looked at.
    """

    def __init__(self, line: Tensor, causal: bool) -> None:
        self.parameters: tuple[Tensor, ...] = (line,)
        self.line, self.causal = line.detach().contiguous(), causal
        self.length = (line.shape[1] + 1) // 2
        self.learned = line.requires_grad and torch.is_grad_enabled()
        self.change: Tensor | None = None

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        rows = LEARNED_BLOCK if self.learned else BLOCK
        for start in range(0, self.length, rows):
            yield start, min(start + rows, self.length), self.length - start if self.causal else self.length

    def make(self, start: int, stop: int, keys: int) -> Tensor:
        heads, width = self.line.shape
        offset = self.line.storage_offset() + start
        return self.line.as_strided((1, heads, stop - start, keys), (0, width, 1, 1), offset)

    def gradient(self, change: Tensor, start: int, stop: int, keys: int) -> None:
        if self.change is None:
            self.change = torch.zeros_like(self.line)
        rows = stop - start
        # a row longer by `rows`, read again with rows shorter by one: each next row lies one further to the right
        skewed = torch.nn.functional.pad(change.sum(dim=0), (0, rows)).flatten(1)[:, : rows * (keys + rows - 1)]
        self.change[:, start : start + keys + rows - 1] += skewed.unflatten(1, (rows, -1)).sum(dim=1)

    def gradients(self) -> tuple[Tensor | None, ...]:
        change, self.change = self.change, None
        return (change,)
