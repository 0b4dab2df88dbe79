"""Where the patches of an image lie, as one number a token, so that they go where the positions of text go.

A patch in row r and column c has the place r 2^16 + c. A token that has no place in the image (class, distillation) has
the place -1.
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
    """Return the row, the column and whether there are any, of tokens at `places`: three tensors of its shape.

    Row and column of a token without a place are 0.
    """
    placed = places >= 0
    held = places.clamp(min=0)
    return held // STRIDE, held % STRIDE, placed


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
    """Refuse an image size of which patches would leave a rest, but for the one that the model was made for.

    Raises:
        SchemeError: it does; the message names the nearest that does not.
    """
    patch = geometry.patch_size
    assert patch is not None
    if size == geometry.image_size or not any(side % part for side, part in zip(size, patch, strict=True)):
        return
    near = " x ".join(str(max(1, round(side / part)) * part) for side, part in zip(size, patch, strict=True))
    raise SchemeError(
        f"{owner}: an image of {size[0]} x {size[1]} pixels is no whole number of patches of {patch[0]} x {patch[1]}; "
        f"the nearest size that is: {near}."
    )
