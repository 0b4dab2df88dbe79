"""The embedding site of models that see images: rows of the table for whatever grid of patches an image gives."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from hf_posswap.errors import PositionRangeError
from hf_posswap.families.images import tensor_at
from hf_posswap.families.modules import WeakModule
from hf_posswap.geometry import Geometry
from hf_posswap.schemes.common.grid_table import GridTable

ROWS_METHOD = "interpolate_pos_encoding"
"""What transformers calls the method that gives the rows, and the argument that has the method called."""


class GridRows:
    """Stands for the method `interpolate_pos_encoding` of one module that makes tokens of an image.

    Args:
        embeddings: that module.
        table: path of the parameter that holds the table, below it.
        scheme: of the table; None: the patches have no rows, only the other tokens have.
        geometry: of the model.
    """

    def __init__(self, embeddings: nn.Module, table: str, scheme: GridTable | None, geometry: Geometry) -> None:
        self.embeddings = WeakModule(embeddings)  # which has this as its method
        self.table, self.scheme, self.geometry = table, scheme, geometry

    def __call__(self, embeddings: Tensor, height: int, width: int) -> Tensor:
        """Return the rows [1, N, E] of all tokens of an image of so many pixels, in the dtype of `embeddings`."""
        held = tensor_at(self.embeddings(), self.table)
        assert held is not None
        prefix, grid = self.geometry.prefix_tokens, self.geometry.grid((height, width))
        rows = held.flatten(0, -2) if held.ndim > 1 else held.new_zeros((0, embeddings.shape[-1]))  # a lone zero
        if self.scheme is None:
            patches = rows.new_zeros((grid[0] * grid[1], rows.shape[-1]))
        else:
            patches = self._of_patches(rows[prefix:], grid, self.scheme)
        return torch.cat((rows[:prefix], patches))[None].to(embeddings.dtype)

    def _of_patches(self, rows: Tensor, grid: tuple[int, int], scheme: GridTable) -> Tensor:
        own = scheme.grid(self.geometry)
        return rows if grid == own else scheme.table(rows, own, grid, self.geometry).to(rows)


class RowsHook:
    """Pre-hook of the module that makes tokens of an image: whatever its size, the rows are those of its grid.

    Args:
        model_name: for messages.
        geometry: of the model.
        native: the image size in the model's config, of which patches may leave a rest.
        square: whether the model's head takes the patches for a square.
    """

    def __init__(self, model_name: str, geometry: Geometry, native: tuple[int, int], square: bool) -> None:
        self.model_name, self.geometry, self.native, self.square = model_name, geometry, native, square

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        self.check(_size(args, kwargs))
        takes = inspect.signature(type(module).forward).parameters
        # what takes no such argument asks for the rows by itself
        return args, {**kwargs, ROWS_METHOD: True} if ROWS_METHOD in takes else kwargs

    def check(self, size: tuple[int, int]) -> None:
        """Refuse an image size of which patches leave a rest, or that the model's head cannot take.

        Raises:
            PositionRangeError: it is such a one.
        """
        patch = self.geometry.patch_size
        assert patch is not None
        rows, columns = self.geometry.grid(size)
        rest = size not in (self.native, self.geometry.image_size) and (size[0] % patch[0] or size[1] % patch[1])
        if rest or not rows or not columns:
            raise PositionRangeError(
                f"{self.model_name} was given images of {size[0]} x {size[1]} pixels, which are no whole number of "
                f"patches of {patch[0]} x {patch[1]}: resize or pad them to one."
            )
        if self.square and rows != columns:
            raise PositionRangeError(
                f"{self.model_name} was given images of {rows} x {columns} patches, and its head takes as many rows as "
                "columns: give square images."
            )


def _size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    pixels = args[0] if args else kwargs["pixel_values"]
    return pixels.shape[-2], pixels.shape[-1]
