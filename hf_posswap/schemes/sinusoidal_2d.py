"""Sines and cosines of columns and rows: the table of MAE and MoCo v3.

He et al. 2021, https://arxiv.org/abs/2111.06377, appendix A.1; the authors' code,
https://github.com/facebookresearch/mae/blob/main/util/pos_embed.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes.base import SCHEMES
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.common.grid_table import GridTable
from hf_posswap.schemes.sinusoidal import checked_scale, matching_scale


@SCHEMES.register("sinusoidal_2d")
@dataclass(frozen=True)
class Sinusoidal2D(GridTable):
    """Row (r, c) = scale [sin(c w) | cos(c w) | sin(r w) | cos(r w)], w_i = base^(-4i/E) for i = 0..E/4-1.

    Half the width is for the column, half for the row, in the order of the authors' code. A table for any other image
    size is computed, not interpolated.

    Attributes:
        image_size: what the table is made for, in pixels: one number, or height and width; None keeps the model's own.
            Images of other sizes run in any case.
        base: of the wavelengths.
        scale: factor on the table; "match" gives it the root mean square of the table it replaces.

    Example:
        >>> Sinusoidal2D(scale=1.0).trainable
        False
    """

    name: ClassVar[str] = "sinusoidal_2d"
    summary: ClassVar[str] = "fixed sines and cosines, half of them of the column, half of the row"
    source: ClassVar[str] = "https://arxiv.org/abs/2111.06377"
    trainable: ClassVar[bool] = False

    base: float = 10000.0
    scale: float | Literal["match"] = "match"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "base", checks.number(self.name, "base", self.base, above=1.0))
        object.__setattr__(self, "scale", checked_scale(self.name, self.scale))

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        if geometry.row_width % 4:
            raise SchemeError(
                f"{self.name}: needs a hidden size that 4 divides, a sine and a cosine of a row and of a column a "
                f"frequency; this model's is {geometry.row_width}. Scheme 'learned_2d' works with any."
            )
        return resolved

    def fit(self, old: Tensor, geometry: Geometry) -> Self:
        return matching_scale(self, old)

    def table(self, old: Tensor, held: tuple[int, int], grid: tuple[int, int], geometry: Geometry) -> Tensor:
        if self.scale == "match":
            raise SchemeError(f"{self.name}: scale is still 'match': call fit(old, geometry) first, or give a number.")
        width = geometry.row_width
        omega = self.base ** -(torch.arange(0, width, 4, dtype=torch.float64, device="cpu") / width)  # [E/4]
        rows, columns = (torch.arange(count, dtype=torch.float64, device="cpu")[:, None] * omega for count in grid)
        of_row, of_column = (torch.cat((angles.sin(), angles.cos()), dim=-1) for angles in (rows, columns))  # [., E/2]
        shape = (*grid, width // 2)
        table = torch.cat((of_column[None].expand(shape), of_row[:, None].expand(shape)), dim=-1)  # [R, C, E]
        return (table * self.scale).float().flatten(0, 1)
