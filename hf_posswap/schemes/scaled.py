"""Rotary schemes that stretch the original length by a factor, with the same angles for every text.

Position interpolation: Chen et al. 2023, https://arxiv.org/abs/2306.15595. Llama 3: Meta's release code for Llama 3.1,
https://github.com/meta-llama/llama-models (`apply_scaling`). NTK-by-parts and YaRN: Peng et al. 2023,
https://arxiv.org/abs/2309.00071, sections 3.2 and 3.4. Resonance: Wang et al. 2024, https://arxiv.org/abs/2403.00071,
algorithm 1, which rounds the wavelengths of any rotary scheme.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.rope_math import default_inv_freq, temperature
from hf_posswap.schemes.base import SCHEMES, Traits
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.rope import RotaryScheme

MOST = 1e6
"""The largest factor: beyond it float32 frequencies lose their meaning."""


@dataclass(frozen=True, kw_only=True)
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
    def stand_ins(cls, geometry: Geometry) -> dict[str, object]:
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
@dataclass(frozen=True, kw_only=True)
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

    def native_rope(self, geometry: Geometry) -> dict[str, object]:
        return {"rope_type": "linear", "rope_theta": self.filled("base"), "factor": self.filled("factor")}


@SCHEMES.register("llama3")
@dataclass(frozen=True, kw_only=True)
class Llama3(ScaledRotary):
    """Llama 3 scaling. With m = (L/wavelength - l)/(h - l): theta' = (1 - m) theta/s + m theta, m clipped to [0, 1].

    It is in Meta's reference code of Llama 3.1, https://github.com/meta-llama/llama-models (`apply_scaling`). The paper
    of the models does not have it: it raises the base.

    Attributes:
        low_freq_factor: l; waves longer than L/l are interpolated fully.
        high_freq_factor: h; waves shorter than L/h are kept.

    Example:
        >>> Llama3(factor=8.0).high_freq_factor
        4.0
    """

    name: ClassVar[str] = "llama3"
    summary: ClassVar[str] = "Llama 3's scaling: interpolate long waves, keep short ones"
    source: ClassVar[str] = "https://github.com/meta-llama/llama-models"

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

    def native_rope(self, geometry: Geometry) -> dict[str, object]:
        return {
            "rope_type": "llama3",
            "rope_theta": self.filled("base"),
            "factor": self.filled("factor"),
            "original_max_position_embeddings": self.filled("original_length"),
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
        }


def correction_dim(rotations: float, dim: int, base: float, original_length: int) -> float:
    """Return the index, a fraction, of the pair that turns `rotations` times within the original length.

    Example:
        >>> round(correction_dim(32, dim=128, base=10000.0, original_length=4096), 3)
        20.944
    """
    return dim * math.log(original_length / (rotations * 2 * math.pi)) / (2 * math.log(base))


@SCHEMES.register("ntk_by_parts")
@dataclass(frozen=True, kw_only=True)
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

    def native_rope(self, geometry: Geometry) -> dict[str, object] | None:
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


@SCHEMES.register("yarn")
@dataclass(frozen=True, kw_only=True)
class Yarn(NTKByParts):
    """YaRN. theta' = ramp theta/s + (1 - ramp) theta; cos and sin times 0.1 ln s + 1.

    The paper divides whole scores by a temperature. Scaling cos and sin, as the authors' code and transformers do, is
    equivalent if the whole head rotates; with partial rotation it sharpens only the scores of the rotated dimensions.

    Attributes:
        attention_factor: factor on cos and sin; None computes it from s (and mscale, mscale_all_dim).
        mscale: with `mscale_all_dim`, DeepSeek's form g(s, mscale) / g(s, mscale_all_dim).
        mscale_all_dim: see mscale.

    Example:
        >>> Yarn(factor=16.0).beta_fast
        32.0
    """

    name: ClassVar[str] = "yarn"
    summary: ClassVar[str] = "YaRN: fast pairs kept, slow ones interpolated, attention sharpened"
    source: ClassVar[str] = "https://arxiv.org/abs/2309.00071"

    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, field)
            if value is not None:
                object.__setattr__(self, field, checks.number(self.name, field, value, above=0.0))
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise SchemeError(
                f"{self.name}: mscale and mscale_all_dim act together, got mscale={self.mscale} and "
                f"mscale_all_dim={self.mscale_all_dim}; give both, or attention_factor itself."
            )

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        if resolved.attention_factor is not None:
            return resolved
        factor = temperature(resolved.filled("factor"), self.mscale or 1.0)
        if self.mscale_all_dim is not None:
            factor /= temperature(resolved.filled("factor"), self.mscale_all_dim)
        return dataclasses.replace(resolved, attention_factor=factor)

    def attention_scaling(self, geometry: Geometry) -> float:
        return self.filled("attention_factor")

    def native_rope(self, geometry: Geometry) -> dict[str, object] | None:
        # attention_factor is written out too: some loaders drop mscale, and DeepSeek reads mscale_all_dim twice
        native = super().native_rope(geometry)
        if native is not None and native["rope_type"] == "yarn":
            scales = {"mscale": self.mscale, "mscale_all_dim": self.mscale_all_dim}
            native |= {name: scale for name, scale in scales.items() if scale is not None}
        return native


def resonant(inv_freq: Tensor) -> Tensor:
    """Return 2 pi / round(2 pi / theta_i), shape [R/2], float64, of angles `inv_freq` [R/2] in (0, 2 pi].

    Example:
        >>> (2 * torch.pi / resonant(torch.tensor([1.0, 0.1]))).round(decimals=3)
        tensor([ 6., 63.], dtype=torch.float64)
    """
    wavelengths = (2 * torch.pi / inv_freq.double()).round()  # [R/2], tokens
    return 2 * torch.pi / wavelengths


@dataclass(frozen=True, kw_only=True)
class _WholeTokens(RotaryScheme):
    """Mixin of schemes whose wavelengths are whole tokens: a config holds them as a list of factors."""

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, training_free=False)

    def native_rope(self, geometry: Geometry) -> dict[str, object] | None:
        return self.native_list(geometry)


@SCHEMES.register("resonance")
@dataclass(frozen=True, kw_only=True)
class Resonance(_WholeTokens):
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

    def theta(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        plain = default_inv_freq(self.filled("base"), self.rotary_dim(geometry), torch.float64)
        return resonant(plain).to(dtype)


@SCHEMES.register("resonance_yarn")
@dataclass(frozen=True, kw_only=True)
class ResonanceYarn(_WholeTokens, Yarn):
    """Resonance YaRN: YaRN, then its wavelengths rounded to whole tokens.

    Example:
        >>> ResonanceYarn(factor=8).beta_fast
        32.0
    """

    name: ClassVar[str] = "resonance_yarn"
    summary: ClassVar[str] = "Resonance YaRN: YaRN with wavelengths rounded to whole tokens"
    source: ClassVar[str] = "https://arxiv.org/abs/2403.00071"

    def theta(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        return resonant(super().theta(geometry, length, torch.float64)).to(dtype)
