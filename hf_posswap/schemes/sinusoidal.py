"""The sinusoidal table of the first transformer. Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.5."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes.base import SCHEMES
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.common.table import TableScheme

S = TypeVar("S", bound=Any)


def checked_scale(owner: str, scale: Any) -> float | Literal["match"]:
    """Return `scale` if it is "match" or a number above 0.

    Raises:
        SchemeError: it is neither.
    """
    if scale == "match":
        return "match"
    if isinstance(scale, str):
        raise SchemeError(f"{owner}: scale must be 'match' or a number > 0, got {scale!r}.")
    return checks.number(owner, "scale", scale, above=0.0)


def matching_scale(scheme: S, old: Tensor) -> S:
    """Return `scheme` with the scale that gives sines and cosines the root mean square of the table `old`.

    Raises:
        SchemeError: the table has none.
    """
    if scheme.scale != "match":
        return scheme
    rms = old.detach().cpu().double().square().mean().sqrt().item()
    if not math.isfinite(rms):
        raise SchemeError(
            f"{scheme.name}: the table to match has NaN or infinite values; repair it, or give scale as a number."
        )
    # rows of sines and cosines have root mean square sqrt(1/2) exactly; a zero table has nothing to match
    return dataclasses.replace(scheme, scale=rms * 2**0.5 if rms > 0 else 1.0)


@SCHEMES.register("sinusoidal")
@dataclass(frozen=True)
class Sinusoidal(TableScheme):
    """PE(p, 2i) = scale sin(p base^(-2i/E)), PE(p, 2i+1) = scale cos(same).

    Attributes:
        base: of the wavelengths.
        layout: "interleaved" sines and cosines (the paper), or "halves": [sin | cos] (fairseq, Marian).
        scale: factor on the table; "match" gives it the root mean square of the table it replaces.

    Example:
        >>> Sinusoidal(layout="halves", scale=1.0).layout
        'halves'
    """

    name: ClassVar[str] = "sinusoidal"
    summary: ClassVar[str] = "fixed sines and cosines, scaled to the table they replace"
    source: ClassVar[str] = "https://arxiv.org/abs/1706.03762"
    trainable: ClassVar[bool] = False

    base: float = 10000.0
    layout: Literal["interleaved", "halves"] = "interleaved"
    scale: float | Literal["match"] = "match"

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", checks.number(self.name, "base", self.base, above=1.0))
        checks.choice(self.name, "layout", self.layout, ("interleaved", "halves"))
        object.__setattr__(self, "scale", checked_scale(self.name, self.scale))

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        super().resolve(geometry, max_length)
        if geometry.row_width % 2:
            raise SchemeError(
                f"{self.name}: needs an even hidden size, a sine and a cosine a frequency; this model's is "
                f"{geometry.row_width}. Scheme 'learned' works with any."
            )
        return self

    def fit(self, old: Tensor, geometry: Geometry) -> Self:
        return matching_scale(self, old)

    def table(self, old: Tensor, rows: int, geometry: Geometry) -> Tensor:
        if self.scale == "match":
            raise SchemeError(f"{self.name}: scale is still 'match': call fit(old, geometry) first, or give a number.")
        width = geometry.row_width
        exponents = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width  # [E/2]
        positions = torch.arange(rows, dtype=torch.float64, device="cpu")[:, None]  # [P, 1]
        angles = positions * self.base**-exponents  # [P, E/2]
        waves = (angles.sin(), angles.cos())
        if self.layout == "halves":
            table = torch.cat(waves, dim=-1)
        else:
            table = torch.stack(waves, dim=-1).flatten(-2)
        return (table * self.scale).float()  # [P, E]
