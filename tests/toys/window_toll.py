"""A toy scheme, whole: near tokens attend freely, far ones pay a toll that each head learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posswap.schemes import SCHEMES, Geometry, Kind, Mechanism, Scheme


@SCHEMES.register("window-toll")
@dataclass(frozen=True)
class WindowToll(Scheme):
    """score - toll_h where |i - j| >= window.

    Attributes:
        window: distance, in tokens, from which a key costs.
        toll: cost for each head before training.

    Example:
        >>> WindowToll(window=4).toll
        2.0
    """

    name: ClassVar[str] = "window-toll"
    summary: ClassVar[str] = "a learned toll, one a head, on keys outside a window"
    source: ClassVar[str] = "https://arxiv.org/abs/2004.05150"
    kind: ClassVar[Kind] = "bias"

    window: int = 4
    toll: float = 2.0

    def mechanism(self, geometry: Geometry) -> Mechanism:
        return WindowTollMechanism(self, geometry.num_heads)

    def formula(self, geometry: Geometry, head: int, query: Tensor, key: Tensor, i: int, j: int) -> float:
        return float(query @ key) / geometry.head_dim**0.5 - self.toll * (i - j >= self.window)


class WindowTollMechanism(Mechanism):
    """Subtracts the toll from the scores of far keys."""

    biases = True

    def __init__(self, scheme: WindowToll, heads: int) -> None:
        super().__init__()
        self.window = scheme.window
        self.toll = nn.Parameter(torch.full((heads,), scheme.toll, dtype=torch.float32))  # [H]

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        distance = (query_positions[:, :, None] - key_positions[:, None, :]).abs()  # [B, Q, K]
        return -self.toll.float()[:, None, None] * (distance >= self.window)[:, None]  # [B, H, Q, K]
