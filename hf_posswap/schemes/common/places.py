"""The location of image patches as one number per token, so that it can be passed like a text position.

A patch in row r and column c has the number r 2^16 + c. A token without a patch (class, distillation) has the number
-1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry

STRIDE = 2**16
NOWHERE = -1


def places_of(grid: tuple[int, int], prefix: int, device: torch.device) -> Tensor:
    """Return the places [1, prefix + R C] of the tokens of an image of R rows and C columns of patches.

    Example:
        >>> places_of((2, 2), 1, torch.device("cpu")).tolist()
        [[-1, 0, 1, 65536, 65537]]
    """
    rows, columns = (torch.arange(count, device=device) for count in grid)
    patches = (rows[:, None] * STRIDE + columns).flatten()  # [R C]
    return torch.cat((patches.new_full((prefix,), NOWHERE), patches))[None]


def row_and_column(places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row and the column of tokens at `places`, and whether they are patches: three tensors of its shape.

    Row and column of a token without a patch are 0.
    """
    placed = places >= 0
    clamped = places.clamp(min=0)
    return clamped // STRIDE, clamped % STRIDE, placed


def checked_size(owner: str, value: object) -> tuple[int, int]:
    """Return the image size `value`, one number or height and width in pixels, as height and width.

    Raises:
        SchemeError: it is neither.
    """
    both = (value, value) if isinstance(value, int) else value
    sides = list(both) if isinstance(both, tuple | list) else []
    if len(sides) != 2 or not all(type(side) is int and 1 <= side < STRIDE for side in sides):
        raise SchemeError(
            f"{owner}: image_size must be a number of pixels, or height and width, each from 1 to {STRIDE - 1}, got "
            f"{value!r}."
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
