"""Dual chunk attention: positions that start anew in each chunk, without training.

An et al. 2024, https://arxiv.org/abs/2402.17463, section 3; chunk and window as the authors' code has them
(https://github.com/HKUNLP/ChunkLlama, whose first version took L/16 for the window).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.kernels.merge import Region
from hf_posswap.schemes.base import SCHEMES
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.common.piecewise import Piecewise, RegionPositions


@SCHEMES.register("dual_chunk")
@dataclass(frozen=True)
class DualChunk(Piecewise):
    """Dual chunk attention (DCA): a key at j has position j mod l, so its rotation is final when it is cached.

    A query at i has position i mod l for keys in the same chunk of l tokens, min(i mod l + l, s) for keys of the
    previous chunk, so that the nearest s - l keep their distance, and min(2 l - 1, s) for older ones. The paper has no
    later keys, but a mask may show them. They are treated as in the reversed text: max(i mod l - l, l - 1 - s) for
    those of the next chunk, so that the nearest s - l keep their distance, and max(-l, l - 1 - s) for later ones.

    The authors' released code also multiplies cos and sin by 0.05 ln(n/L) + 1 once it has read a text of n > L tokens,
    and for all texts after it. The paper's results do not use this factor, and neither does this scheme. It keeps the
    scaling of the model's own angles and counts positions from the end of the padding; the released code uses plain
    angles and ignores padding while it reads a prompt.

    Attributes:
        chunk: s, the largest position that a query takes, less than L; None takes 3 L/4.
        local: s - l, how many keys of the previous chunk keep their distance at least; None takes L/8.

    Example:
        >>> DualChunk(chunk=3072, local=512).local
        512
    """

    name: ClassVar[str] = "dual_chunk"
    summary: ClassVar[str] = "dual chunk attention: positions start anew in each chunk"
    source: ClassVar[str] = "https://arxiv.org/abs/2402.17463"

    chunk: int | None = None
    local: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("chunk", "local"):
            if getattr(self, field) is not None:
                checks.length(self.name, field, getattr(self, field))

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        original = resolved.filled("original_length")
        chunk = max(2, 3 * original // 4) if self.chunk is None else self.chunk
        local = max(1, original // 8) if self.local is None else self.local
        if not local < chunk < original:
            raise SchemeError(
                f"{self.name}: needs local < chunk < original length, got local={local}, chunk={chunk} and an original "
                f"length of {original} tokens."
            )
        return dataclasses.replace(resolved, chunk=chunk, local=local)

    def cached_key(self, positions: Tensor) -> Tensor:
        return positions % (self.filled("chunk") - self.filled("local"))

    def region_positions(self) -> tuple[RegionPositions, ...]:
        largest = self.filled("chunk")
        size = largest - self.filled("local")
        least = size - 1 - largest
        return (
            RegionPositions(lambda i: i % size, None, Region(size, 0, 1)),
            RegionPositions(lambda i: (i % size + size).clamp(max=largest), None, Region(size, 1, 2)),
            RegionPositions(lambda i: torch.full_like(i, min(2 * size - 1, largest)), None, Region(size, 2, None)),
            RegionPositions(lambda i: (i % size - size).clamp(min=least), None, Region(size, -1, 0)),
            RegionPositions(lambda i: torch.full_like(i, max(-size, least)), None, Region(size, None, -1)),
        )
