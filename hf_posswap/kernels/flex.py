"""A linear penalty for flex_attention, from positions: nothing of [Q, K] is held, under any mask.

Press et al. 2021, https://arxiv.org/abs/2108.12409, section 3.
"""

from __future__ import annotations

from torch import Tensor


class Penalty:
    """Reads as a bias [B, H, Q, K] does, one number at a time: -slopes[h] |i - j|, in float32.

    Args:
        slopes: [H], float32.
        query: positions, [B, Q].
        key: positions, [B, K].
    """

    def __init__(self, slopes: Tensor, query: Tensor, key: Tensor) -> None:
        self.slopes, self.query, self.key = slopes, query, key

    def __getitem__(self, index: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        batch, head, row, column = index
        return -self.slopes[head] * (self.query[batch, row] - self.key[batch, column]).abs()
