"""The location of image patches as one number per token, so that it can be passed like a text position.

A patch in row r and column c has the number r 2^16 + c. A token without a patch (class, distillation) has the number
-1.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
