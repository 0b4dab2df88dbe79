"""ALiBi for images: a penalty on the attention score that grows with the distance of two patches, one slope a head.

Fuller et al. 2023 (CROMA), https://arxiv.org/abs/2311.00566, section 3.3: the Euclidean distance, in patches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_posswap.geometry import Geometry
from hf_posswap.schemes.alibi import slopes
from hf_posswap.schemes.base import SCHEMES, Input, Kind, Scheme, Traits
from hf_posswap.schemes.common.places import row_and_column
from hf_posswap.schemes.mechanism import Mechanism


@SCHEMES.register("alibi_2d")
@dataclass(frozen=True)
class Alibi2D(Scheme):
    """Score - m_h sqrt((r - r')^2 + (c - c')^2), m_h the slopes of ALiBi.

    Tokens without a patch (class, distillation) attend and are attended to without a penalty.

    Example:
        >>> Alibi2D().traits.relative
        True
    """

    name: ClassVar[str] = "alibi_2d"
    summary: ClassVar[str] = "a linear penalty on the distance of patches, one slope a head"
    source: ClassVar[str] = "https://arxiv.org/abs/2311.00566"
    kind: ClassVar[Kind] = "bias"
    inputs: ClassVar[tuple[Input, ...]] = ("images",)

    @property
    def traits(self) -> Traits:
        return Traits()

    def mechanism(self, geometry: Geometry) -> Mechanism:
        return Alibi2DMechanism(geometry.num_heads)


class Alibi2DMechanism(Mechanism):
    """Adds -m_h times the distance to the scores."""

    biases = True

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.steepness = torch.tensor(slopes(heads), dtype=torch.float32, device="cpu")  # [H]

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        if self.steepness.device != query_positions.device:
            self.steepness = self.steepness.to(query_positions.device)
        rows, columns, placed = row_and_column(query_positions[:, :, None])  # [B, Q, 1]
        key_rows, key_columns, key_placed = row_and_column(key_positions[:, None, :])  # [B, 1, K]
        distance = torch.hypot((rows - key_rows).float(), (columns - key_columns).float())  # [B, Q, K]
        distance = distance.masked_fill(~(placed & key_placed), 0.0)
        return -self.steepness[:, None, None] * distance[:, None]

    def extra_repr(self) -> str:
        return f"heads={len(self.steepness)}"
