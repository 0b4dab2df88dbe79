"""YaRN: interpolate slow pairs, keep fast ones, sharpen attention.

Peng et al. 2023, https://arxiv.org/abs/2309.00071: NTK-by-parts (section 3.2) with the temperature of section 3.4.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes.base import SCHEMES
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.ntk_by_parts import NTKByParts


def temperature(factor: float, mscale: float = 1.0) -> float:
    """Return 0.1 mscale ln(s) + 1, the factor on cos and sin (eq. 22: sqrt(1/t)).

    Example:
        >>> round(temperature(16.0), 4)
        1.2773
    """
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


@SCHEMES.register("yarn")
@dataclass(frozen=True)
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

    def native_rope(self, geometry: Geometry) -> dict[str, Any] | None:
        # attention_factor is written out too: some loaders drop mscale, and DeepSeek reads mscale_all_dim twice
        native = super().native_rope(geometry)
        if native is not None and native["rope_type"] == "yarn":
            scales = {"mscale": self.mscale, "mscale_all_dim": self.mscale_all_dim}
            native |= {name: scale for name, scale in scales.items() if scale is not None}
        return native
