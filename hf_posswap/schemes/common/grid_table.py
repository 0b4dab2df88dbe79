"""Base of the schemes that add a table row to each patch of an image."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from hf_posswap.geometry import Geometry
from hf_posswap.schemes.base import Input, Traits
from hf_posswap.schemes.common.places import check_divides, checked_size
from hf_posswap.schemes.common.table import AnyTable


@dataclass(frozen=True)
class GridTable(AnyTable):
    """A scheme that defines the table of the patches; tokens without a patch keep their rows.

    Attributes:
        image_size: what the table is made for, in pixels: one number, or height and width; None keeps the model's own.
            Images of other sizes run in any case.
    """

    inputs: ClassVar[tuple[Input, ...]] = ("images",)

    image_size: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.image_size is not None:
            object.__setattr__(self, "image_size", checked_size(self.name, self.image_size))

    @property
    def traits(self) -> Traits:
        return Traits(relative=False, unbounded=True, shardable=True)

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        super().resolve(geometry, max_length)
        resolved = dataclasses.replace(self, image_size=self.image_size or geometry.image_size)
        check_divides(self.name, resolved.filled("image_size"), geometry)
        return resolved

    def reach(self, geometry: Geometry) -> int | None:
        rows, columns = self.grid(geometry)
        return geometry.prefix_tokens + rows * columns

    def grid(self, geometry: Geometry) -> tuple[int, int]:
        """Return the rows and columns of patches that the table of a resolved scheme has."""
        return geometry.grid(self.filled("image_size"))

    def fit(self, old: Tensor, geometry: Geometry) -> Self:
        """Return a copy with every parameter that depends on the weights of the `old` table [R C, E] filled in."""
        return self

    def table(self, old: Tensor, held: tuple[int, int], grid: tuple[int, int], geometry: Geometry) -> Tensor:
        """Return the rows of the patches for a `grid` of R rows and C columns, [R C, E], float32 or wider.

        Args:
            old: the rows of a grid of size `held`, without those of tokens without a patch.
            held: rows and columns of the grid of `old`.
            grid: rows and columns of the new grid.
            geometry: of the model.
        """
        raise NotImplementedError
