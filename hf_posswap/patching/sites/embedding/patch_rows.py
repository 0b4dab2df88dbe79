"""The embedding site of vision models: table rows for any grid of patches."""

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
"""The name in transformers of the method that returns the rows, and of the argument that enables it."""


class GridRows:
    """Replaces the method `interpolate_pos_encoding` of a module that turns an image into tokens.

    Args:
        embeddings: that module.
        table: path of the parameter that holds the table, below it.
        scheme: of the table; None: only tokens that are not patches have rows.
        geometry: of the model.
    """

    def __init__(self, embeddings: nn.Module, table: str, scheme: GridTable | None, geometry: Geometry) -> None:
        self.embeddings = WeakModule(embeddings)  # weak, because this is its method
        self.table, self.scheme, self.geometry = table, scheme, geometry

    def __call__(self, embeddings: Tensor, height: int, width: int) -> Tensor:
        """Return the rows [1, N, E] of all tokens of an image of this size in pixels, in the dtype of `embeddings`."""
        table = tensor_at(self.embeddings(), self.table)
        assert table is not None
        prefix, grid = self.geometry.prefix_tokens, self.geometry.grid((height, width))
        rows = table.flatten(0, -2) if table.ndim > 1 else table.new_zeros((0, embeddings.shape[-1]))  # a single zero
        if self.scheme is None:
            patches = rows.new_zeros((grid[0] * grid[1], rows.shape[-1]))
        else:
            patches = self._of_patches(rows[prefix:], grid, self.scheme)
        return torch.cat((rows[:prefix], patches))[None].to(embeddings.dtype)

    def _of_patches(self, rows: Tensor, grid: tuple[int, int], scheme: GridTable) -> Tensor:
        native = scheme.grid(self.geometry)
        return rows if grid == native else scheme.table(rows, native, grid, self.geometry).to(rows)


class RowsHook:
    """Pre-hook of the module that turns an image into tokens: requests the rows of the image's own grid.

    Args:
        model_name: for messages.
        geometry: of the model.
        native: the image size in the model's config, which patches need not divide.
        square: whether the model's head assumes a square of patches.
    """

    def __init__(self, model_name: str, geometry: Geometry, native: tuple[int, int], square: bool) -> None:
        self.model_name, self.geometry, self.native, self.square = model_name, geometry, native, square

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        self.check(_size(args, kwargs))
        takes = inspect.signature(type(module).forward).parameters
        # a forward without this argument always requests the rows
        return args, {**kwargs, ROWS_METHOD: True} if ROWS_METHOD in takes else kwargs

    def check(self, size: tuple[int, int]) -> None:
        """Refuse an image size that patches do not divide, or that the model's head does not support.

        Raises:
            PositionRangeError: the size is not supported.
        """
        patch = self.geometry.patch_size
        assert patch is not None
        rows, columns = self.geometry.grid(size)
        rest = size not in (self.native, self.geometry.image_size) and (size[0] % patch[0] or size[1] % patch[1])
        if rest or not rows or not columns:
            raise PositionRangeError(
                f"{self.model_name} was given images of {size[0]} x {size[1]} pixels, which is not a whole number "
                f"of patches of {patch[0]} x {patch[1]}: resize or pad them."
            )
        if self.square and rows != columns:
            raise PositionRangeError(
                f"{self.model_name} was given images of {rows} x {columns} patches, and its head needs as many rows as "
                "columns: give square images."
            )


def _size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    pixels = args[0] if args else kwargs["pixel_values"]
    return pixels.shape[-2], pixels.shape[-1]
