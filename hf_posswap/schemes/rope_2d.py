"""Axial rotary embedding: half of the pairs turn by the row of a patch, half by its column.

Heo et al. 2024, https://arxiv.org/abs/2403.13298, section 3.2, equation 9.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry, Layout
from hf_posswap.rope_math import CosSin, Frequencies, cos_sin, default_inv_freq, rotate
from hf_posswap.schemes.base import SCHEMES, Input, Kind, Scheme, Traits
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.common.places import row_and_column
from hf_posswap.schemes.mechanism import Mechanism


@SCHEMES.register("rope_2d")
@dataclass(frozen=True)
class Rope2D(Scheme):
    """Of the R/2 rotary pairs, i < R/4 turn by row * theta_i and i >= R/4 by column * theta_(i - R/4).

    theta_i = base^(-4i/R), i = 0..R/4-1. A score depends only on how many rows and columns lie between two
    patches. Tokens without a patch (class, distillation) do not turn.

    Attributes:
        base: of the angles; 100 is the paper's: an image has far fewer rows than a text has tokens.
        partial: the share of each head that is rotated, in (0, 1].
        layout: how pairs lie in a head: "half" pairs (i, i + R/2), "interleaved" pairs (2i, 2i + 1).

    Example:
        >>> Rope2D(base=10000.0).traits.relative
        True
    """

    name: ClassVar[str] = "rope_2d"
    summary: ClassVar[str] = "rotary embedding of rows and columns, each with half of the pairs"
    source: ClassVar[str] = "https://arxiv.org/abs/2403.13298"
    kind: ClassVar[Kind] = "rotary"
    inputs: ClassVar[tuple[Input, ...]] = ("images",)

    base: float = 100.0
    partial: float = 1.0
    layout: Layout = "half"

    def __post_init__(self) -> None:
        checked = checks.number(self.name, "base", self.base, above=1.0, maximum=checks.LARGEST)
        object.__setattr__(self, "base", checked)
        checked = checks.number(self.name, "partial", self.partial, above=0.0, maximum=1.0)
        object.__setattr__(self, "partial", checked)
        checks.choice(self.name, "layout", self.layout, ("half", "interleaved"))

    @property
    def traits(self) -> Traits:
        return Traits(shardable=True)

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        width = round(geometry.head_dim * self.partial)
        if width < 4 or width % 4:
            raise SchemeError(
                f"{self.name}: rotation by row and column needs a multiple of 4 dimensions a head, but head_dim "
                f"{geometry.head_dim} with partial={self.partial:g} gives {width}; choose partial so that 4 divides "
                "head_dim * partial."
            )
        return dataclasses.replace(resolved, partial=width / geometry.head_dim)

    def mechanism(self, geometry: Geometry) -> Rope2DMechanism:
        return Rope2DMechanism(self, geometry)


class Rope2DMechanism(Mechanism):
    """Rotates q and k by the row and column of their patches."""

    rotates = True

    def __init__(self, scheme: Rope2D, geometry: Geometry) -> None:
        super().__init__()
        self.scheme, self.head_dim = scheme, geometry.head_dim
        theta = default_inv_freq(scheme.base, round(geometry.head_dim * scheme.partial) // 2, torch.float64)  # [R/4]
        self.frequencies = Frequencies.of(theta).to("cpu")

    def prepare(self, positions: Tensor, length: Tensor) -> CosSin:
        if self.frequencies.inv_freq.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        rows, columns, _ = row_and_column(positions)
        by_row, by_column = (cos_sin(axis, self.frequencies) for axis in (rows, columns))  # [B, 1, Q, R/4]
        return CosSin(torch.cat((by_row.cos, by_column.cos), dim=-1), torch.cat((by_row.sin, by_column.sin), dim=-1))

    def rotate_query(self, query: Tensor, prepared: CosSin) -> Tensor:
        return rotate(query, prepared, self.scheme.layout)

    def rotate_key(self, key: Tensor, prepared: CosSin) -> Tensor:
        return rotate(key, prepared, self.scheme.layout)

    def extra_repr(self) -> str:
        return str(self.scheme)
