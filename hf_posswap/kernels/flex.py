"""Biases for flex_attention, read from positions: nothing of [Q, K] is held, under any mask.

Press et al. 2021, https://arxiv.org/abs/2108.12409, section 3; Raffel et al. 2020, https://arxiv.org/abs/1910.10683.
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


class ByDistance:
    """Reads as a bias [B, H, Q, K] does, one number at a time: line[h, i - j + ahead], in float32.

    Args:
        line: [H, N], of the distances -ahead to N - 1 - ahead, which hold those of all queries and keys.
        ahead: how far a key may stand ahead of a query.
        query: positions, [B, Q].
        key: positions, [B, K].
    """

    def __init__(self, line: Tensor, ahead: int, query: Tensor, key: Tensor) -> None:
        self.line, self.query, self.key = line, query + ahead, key

    def __getitem__(self, index: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        batch, head, row, column = index
        return self.line[head, self.query[batch, row] - self.key[batch, column]]
