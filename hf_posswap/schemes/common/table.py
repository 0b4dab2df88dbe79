"""Bases of the schemes that add a table row to each token's embedding, or to each patch of an image."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes.base import Input, Kind, Scheme, Traits

ROW_STRIDE = 2**16
"""A patch in row r and column c of an image has the place r 2^16 + c, one number that is passed like a text position.

A token without a patch (class, distillation) has the place -1.
"""


def places_of(grid: tuple[int, int], prefix: int, device: torch.device) -> Tensor:
    """Return the places [1, prefix + R C] of the tokens of an image of R rows and C columns of patches.

    Example:
        >>> places_of((2, 2), 1, torch.device("cpu")).tolist()
        [[-1, 0, 1, 65536, 65537]]
    """
    rows, columns = (torch.arange(count, device=device) for count in grid)
    patches = (rows[:, None] * ROW_STRIDE + columns).flatten()  # [R C]
    return torch.cat((patches.new_full((prefix,), -1), patches))[None]


def row_and_column(places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row and the column of tokens at `places`, and whether they are patches: three tensors of its shape.

    Row and column of a token without a patch are 0.
    """
    placed = places >= 0
    clamped = places.clamp(min=0)
    return clamped // ROW_STRIDE, clamped % ROW_STRIDE, placed


@dataclass(frozen=True)
class AnyTable(Scheme):
    """A scheme that defines a table, of positions or of patches."""

    kind: ClassVar[Kind] = "table"
    trainable: ClassVar[bool] = True
    """Whether the rows are parameters that training changes; otherwise they are frozen."""

    @property
    def table_part(self) -> Self:
        return self

    def with_table(self, table: Scheme) -> Any:
        return table


@dataclass(frozen=True)
class TableScheme(AnyTable):
    """A scheme that defines the position table; stock models express all of them natively."""

    @property
    def traits(self) -> Traits:
        return Traits(relative=False, unbounded=False, shardable=True)

    def rows(self, geometry: Geometry, max_length: int | None) -> int:
        """Return how many positions the new table has."""
        return geometry.original_length if max_length is None else max_length

    def fit(self, old: Tensor, rows: int, geometry: Geometry) -> Self:
        """Return a copy with every parameter that depends on the weights of the old table filled in.

        Args:
            old: the table it replaces, [P, E], without the family's offset rows.
            rows: positions of the new table.
            geometry: of the model.
        """
        return self

    def table(self, old: Tensor, rows: int, geometry: Geometry) -> Tensor:
        """Return the new table of a fitted scheme, [rows, E], on the CPU, float32 or wider.

        Args:
            old: the table it replaces, [P, E], without the family's offset rows.
            rows: positions of the new table.
            geometry: of the model.
        """
        if type(self).rows_at is TableScheme.rows_at:
            raise NotImplementedError(f"{type(self).__name__} defines neither table nor rows_at.")
        return self.rows_at(torch.arange(rows, device="cpu"), old, rows, geometry)

    def rows_at(self, positions: Tensor, old: Tensor, rows: int, geometry: Geometry) -> Tensor:
        """Return the rows at `positions` [N] of `table`, [N, E].

        A scheme defines one of the two, and of a subclass the one that it defines counts.

        Args:
            positions: of the rows to return, whole numbers below `rows`, [N].
            old: as in `table`.
            rows: likewise.
            geometry: likewise.
        """
        return self.table(old, rows, geometry)[positions]

    @property
    def exact(self) -> bool:
        """Whether the parameters alone reproduce the rows exactly; otherwise `expected` gives them up to rounding."""
        return True

    def expected(self, stored: Tensor, geometry: Geometry) -> Tensor:
        """Return the rows that a frozen table must have, [P, E], float32, given its current rows `stored`."""
        return self.table(stored, len(stored), geometry)


def checked_size(owner: str, value: object) -> tuple[int, int]:
    """Return the image size `value`, one number or height and width in pixels, as height and width.

    Raises:
        SchemeError: it is neither.
    """
    both = (value, value) if isinstance(value, int) else value
    sides = list(both) if isinstance(both, tuple | list) else []
    if len(sides) != 2 or not all(type(side) is int and 1 <= side < ROW_STRIDE for side in sides):
        raise SchemeError(
            f"{owner}: image_size must be a number of pixels, or height and width, each from 1 to {ROW_STRIDE - 1}, "
            f"got {value!r}."
        )
    return sides[0], sides[1]


def check_divides(owner: str, size: tuple[int, int], geometry: Geometry) -> None:
    """Refuse an image size that is not a whole number of patches, except the model's own.

    Raises:
        SchemeError: patches do not divide it; the message names the nearest valid size.
    """
    patch = geometry.patch_size
    assert patch is not None
    if size == geometry.image_size or not any(side % step for side, step in zip(size, patch, strict=True)):
        return
    near = " x ".join(str(max(1, round(side / step)) * step) for side, step in zip(size, patch, strict=True))
    raise SchemeError(
        f"{owner}: an image of {size[0]} x {size[1]} pixels is not a whole number of patches of {patch[0]} x "
        f"{patch[1]}; the nearest valid size is {near}."
    )


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

    def table(self, old: Tensor, old_grid: tuple[int, int], grid: tuple[int, int], geometry: Geometry) -> Tensor:
        """Return the rows of the patches for a `grid` of R rows and C columns, [R C, E], float32 or wider.

        Args:
            old: the rows of a grid of size `old_grid`, without those of tokens without a patch.
            old_grid: rows and columns of the grid of `old`.
            grid: rows and columns of the new grid.
            geometry: of the model.
        """
        raise NotImplementedError
