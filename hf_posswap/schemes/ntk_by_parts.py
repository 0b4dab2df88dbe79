"""NTK-by-parts: fast pairs keep their angles, slow ones are interpolated, with a ramp between.

Peng et al. 2023, https://arxiv.org/abs/2309.00071, section 3.2, in the paper's form (the ramp follows the turns of a
pair) and in that of its authors' code (the ramp follows the pair's index), which is what everyone runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes.base import SCHEMES
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.scaled import ScaledRotary


def correction_dim(rotations: float, dim: int, base: float, original_length: int) -> float:
    """Return the index, a fraction, of the pair that turns `rotations` times within the original length.

    Example:
        >>> round(correction_dim(32, dim=128, base=10000.0, original_length=4096), 3)
        20.944
    """
    return dim * math.log(original_length / (rotations * 2 * math.pi)) / (2 * math.log(base))


@SCHEMES.register("ntk_by_parts")
@dataclass(frozen=True)
class NTKByParts(ScaledRotary):
    """NTK-by-parts, YaRN without its temperature: theta' = ramp theta/s + (1 - ramp) theta, ramp in [0, 1].

    Attributes:
        beta_fast: pairs that turn more often than this within L keep their angle.
        beta_slow: pairs that turn less often are interpolated fully.
        truncate: round the ends of a ramp over the index outwards to whole pairs (gpt-oss: False).
        ramp: "index", linear in the pair's index (the authors' code), or "turns", linear in the turns within L,
            L/wavelength (the paper's equation 18).
        mix: "frequencies", as above, or "wavelengths": theta' = theta / (ramp s + 1 - ramp), the form of
            https://github.com/jquesnelle/yarn/issues/24.

    Example:
        >>> NTKByParts(factor=4, ramp="turns").beta_fast
        32.0
    """

    name: ClassVar[str] = "ntk_by_parts"
    summary: ClassVar[str] = "NTK-by-parts: fast pairs kept, slow ones interpolated; YaRN without temperature"
    source: ClassVar[str] = "https://arxiv.org/abs/2309.00071"

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    ramp: Literal["index", "turns"] = "index"
    mix: Literal["frequencies", "wavelengths"] = "frequencies"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("beta_fast", "beta_slow"):
            object.__setattr__(self, field, checks.number(self.name, field, getattr(self, field), above=0.0))
        if self.beta_fast <= self.beta_slow:
            raise SchemeError(
                f"{self.name}: beta_fast must be greater than beta_slow, got {self.beta_fast:g} and {self.beta_slow:g}."
            )
        checks.flag(self.name, "truncate", self.truncate)
        checks.choice(self.name, "ramp", self.ramp, ("index", "turns"))
        checks.choice(self.name, "mix", self.mix, ("frequencies", "wavelengths"))

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        low, high = resolved.ramp_ends(geometry)
        if low > high and self.ramp == "index":
            raise SchemeError(
                f"{self.name}: no rotary pair turns between beta_slow={self.beta_slow:g} and beta_fast="
                f"{self.beta_fast:g} times within the original {resolved.original_length} tokens (base "
                f"{resolved.base:g}), so there is no ramp; choose betas below and above what its pairs turn."
            )
        return resolved

    def ramp_ends(self, geometry: Geometry) -> tuple[float, float]:
        """Return the indices of the last pair that is kept and the first that is interpolated fully."""
        dim, base, original = self.rotary_dim(geometry), self.filled("base"), self.filled("original_length")
        low = correction_dim(self.beta_fast, dim, base, original)
        high = correction_dim(self.beta_slow, dim, base, original)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, dim - 1)

    def interpolated(self, geometry: Geometry, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the ramp: how far each pair is interpolated, in [0, 1], shape [R/2]."""
        if self.ramp == "turns":
            turns = self.filled("original_length") * self.plain(geometry, dtype) / (2 * torch.pi)  # [R/2]
            return 1 - ((turns - self.beta_slow) / (self.beta_fast - self.beta_slow)).clamp(0, 1)
        low, high = self.ramp_ends(geometry)
        if low == high:
            high += 0.001
        index = torch.arange(self.rotary_dim(geometry) // 2, dtype=dtype, device="cpu")  # [R/2]
        return ((index - low) / (high - low)).clamp(0, 1)

    def theta(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        plain, ramp, factor = self.plain(geometry, dtype), self.interpolated(geometry, dtype), self.filled("factor")
        if self.mix == "wavelengths":
            return plain / (ramp * factor + (1 - ramp))
        return ramp * plain / factor + (1 - ramp) * plain

    def native_rope(self, geometry: Geometry) -> dict[str, Any] | None:
        if self.ramp != "index" or self.mix != "frequencies":
            return self.native_list(geometry)
        return {
            "rope_type": "yarn",
            "rope_theta": self.filled("base"),
            "factor": self.filled("factor"),
            "original_max_position_embeddings": self.filled("original_length"),
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "attention_factor": self.attention_scaling(geometry),
            "truncate": self.truncate,
        }
