"""Resonance RoPE: every wavelength a whole number of tokens, so that a pair repeats itself exactly.

Wang et al. 2024, https://arxiv.org/abs/2403.00071, algorithm 1, which rounds the wavelengths of any rotary scheme.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_posswap.geometry import Geometry
from hf_posswap.rope_math import default_inv_freq
from hf_posswap.schemes.base import SCHEMES, Traits
from hf_posswap.schemes.rope import RotaryScheme
from hf_posswap.schemes.yarn import Yarn


def resonant(inv_freq: Tensor) -> Tensor:
    """Return 2 pi / round(2 pi / theta_i), shape [R/2], float64, of angles `inv_freq` [R/2] in (0, 2 pi].

    Example:
        >>> (2 * torch.pi / resonant(torch.tensor([1.0, 0.1]))).round(decimals=3)
        tensor([ 6., 63.], dtype=torch.float64)
    """
    wavelengths = (2 * torch.pi / inv_freq.double()).round()  # [R/2], tokens
    return 2 * torch.pi / wavelengths


@SCHEMES.register("resonance")
@dataclass(frozen=True)
class Resonance(RotaryScheme):
    """Resonance RoPE: theta'_i = 2 pi / round(2 pi / theta_i) with theta_i = base^(-2i/R).

    In every pair whose wavelength is below the training length, positions beyond that length then see only angles that
    occurred in training. All wavelengths are rounded, as in the paper; a long one barely changes.

    Example:
        >>> Resonance(base=500000.0).base
        500000.0
    """

    name: ClassVar[str] = "resonance"
    summary: ClassVar[str] = "Resonance RoPE: wavelengths rounded to whole tokens"
    source: ClassVar[str] = "https://arxiv.org/abs/2403.00071"

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, training_free=False)

    def theta(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        plain = default_inv_freq(self.filled("base"), self.rotary_dim(geometry), torch.float64)
        return resonant(plain).to(dtype)

    def native_rope(self, geometry: Geometry) -> dict[str, Any] | None:
        return self.native_list(geometry)


@SCHEMES.register("resonance_yarn")
@dataclass(frozen=True)
class ResonanceYarn(Yarn):
    """Resonance YaRN: YaRN, then its wavelengths rounded to whole tokens.

    Example:
        >>> ResonanceYarn(factor=8).beta_fast
        32.0
    """

    name: ClassVar[str] = "resonance_yarn"
    summary: ClassVar[str] = "Resonance YaRN: YaRN with wavelengths rounded to whole tokens"
    source: ClassVar[str] = "https://arxiv.org/abs/2403.00071"

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, training_free=False)

    def theta(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        return resonant(super().theta(geometry, length, torch.float64)).to(dtype)

    def native_rope(self, geometry: Geometry) -> dict[str, Any] | None:
        return self.native_list(geometry)
