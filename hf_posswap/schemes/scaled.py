"""Rotary schemes that stretch the original length by a factor: their base, and the simplest of them.

Position interpolation: Chen et al. 2023, https://arxiv.org/abs/2306.15595.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.rope_math import default_inv_freq
from hf_posswap.schemes.base import SCHEMES
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.rope import RotaryScheme

MOST = 1e6
"""The largest factor: beyond it float32 frequencies lose their meaning."""


@dataclass(frozen=True)
class ScaledRotary(RotaryScheme):
    """A rotary scheme that stretches the original length by a factor.

    Attributes:
        factor: s, target length over original length, >= 1; None takes it from `max_length`.
        original_length: L, positions the model was trained on, in tokens; None takes the model's own.
    """

    factor: float | None = None
    original_length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor is not None:
            object.__setattr__(
                self, "factor", checks.number(self.name, "factor", self.factor, minimum=1.0, maximum=MOST)
            )
        if self.original_length is not None:
            checks.length(self.name, "original_length", self.original_length)

    @classmethod
    def stand_ins(cls, geometry: Geometry) -> dict[str, Any]:
        return {"factor": 2.0}

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        original = self.original_length or geometry.original_length
        factor = self.factor
        if factor is None:
            if max_length is None:
                raise SchemeError(
                    f"{self.name}: give factor or max_length; the model's own length is {original} tokens."
                )
            factor = max(1.0, max_length / original)
        elif max_length is not None and _stretched(factor, original) < max_length:
            raise SchemeError(
                f"{self.name}: factor {factor:g} reaches {_stretched(factor, original)} tokens from the original "
                f"{original}, but max_length is {max_length}; give factor >= "
                f"{math.ceil(1000 * max_length / original) / 1000}, or one of the two alone."
            )
        return dataclasses.replace(resolved, factor=factor, original_length=original)

    def reach(self, geometry: Geometry) -> int | None:
        factor = self.filled("factor")
        return _stretched(factor, self.filled("original_length"))

    def plain(self, geometry: Geometry, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the unscaled theta_i, [R/2]."""
        return default_inv_freq(self.filled("base"), self.rotary_dim(geometry), dtype)


def _stretched(factor: float, original: int) -> int:
    """Return s L in whole tokens, tolerating the rounding of a factor computed as length / L."""
    return math.floor(factor * original + 1e-6)


@SCHEMES.register("linear")
@dataclass(frozen=True)
class Linear(ScaledRotary):
    """Position interpolation: theta'_i = theta_i / s. Chen et al. 2023, https://arxiv.org/abs/2306.15595, eq. 3.

    Example:
        >>> Linear(factor=4).factor
        4.0
    """

    name: ClassVar[str] = "linear"
    summary: ClassVar[str] = "position interpolation (PI): all angles divided by the factor"
    source: ClassVar[str] = "https://arxiv.org/abs/2306.15595"

    def theta(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        return self.plain(geometry, dtype) / self.filled("factor")

    def native_rope(self, geometry: Geometry) -> dict[str, Any]:
        return {"rope_type": "linear", "rope_theta": self.filled("base"), "factor": self.filled("factor")}
