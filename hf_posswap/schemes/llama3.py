"""Llama 3's scaling: long waves interpolated, short ones kept, a smooth band between.

Source: Meta's release code for Llama 3.1, https://github.com/meta-llama/llama-models (`apply_scaling`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes.base import SCHEMES
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.scaled import ScaledRotary


@SCHEMES.register("llama3")
@dataclass(frozen=True)
class Llama3(ScaledRotary):
    """Llama 3 scaling. With m = (L/wavelength - l)/(h - l): theta' = (1 - m) theta/s + m theta, m clipped to [0, 1].

    Attributes:
        low_freq_factor: l; waves longer than L/l are interpolated fully.
        high_freq_factor: h; waves shorter than L/h are kept.

    Example:
        >>> Llama3(factor=8.0).high_freq_factor
        4.0
    """

    name: ClassVar[str] = "llama3"
    summary: ClassVar[str] = "Llama 3's scaling: interpolate long waves, keep short ones"
    source: ClassVar[str] = "https://arxiv.org/abs/2407.21783"

    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("low_freq_factor", "high_freq_factor"):
            object.__setattr__(self, field, checks.number(self.name, field, getattr(self, field), above=0.0))
        if self.high_freq_factor <= self.low_freq_factor:
            raise SchemeError(
                f"{self.name}: high_freq_factor must be greater than low_freq_factor, got {self.high_freq_factor:g} "
                f"and {self.low_freq_factor:g}."
            )

    def theta(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        plain = self.plain(geometry, dtype)  # [R/2]
        turns = self.filled("original_length") * plain / (2 * torch.pi)  # L / wavelength
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return (1 - kept) * plain / self.filled("factor") + kept * plain

    def native_rope(self, geometry: Geometry) -> dict[str, Any]:
        return {
            "rope_type": "llama3",
            "rope_theta": self.filled("base"),
            "factor": self.filled("factor"),
            "original_max_position_embeddings": self.filled("original_length"),
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
        }
