"""A learned table of patches, kept or made to fit another image size.

Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929, section 3.2: "2D interpolation of the pre-trained position
embeddings, according to their location in the original image".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posswap.geometry import Geometry
from hf_posswap.schemes.base import SCHEMES
from hf_posswap.schemes.common.grid_table import GridTable


@SCHEMES.register("learned_2d")
@dataclass(frozen=True)
class Learned2D(GridTable):
    """A learned table of R x C patches, interpolated bicubically for other image sizes.

    The interpolation matches `interpolate_pos_encoding` of transformers: without aligned corners, without antialiasing.

    Attributes:
        image_size: what the table is made for, in pixels: one number, or height and width; None keeps the model's own.
            Images of other sizes run in any case.

    Example:
        >>> Learned2D(image_size=384)
        Learned2D(image_size=(384, 384))
    """

    name: ClassVar[str] = "learned_2d"
    summary: ClassVar[str] = "a learned table of patches, interpolated to any image size"
    source: ClassVar[str] = "https://arxiv.org/abs/2010.11929"

    def table(self, old: Tensor, held: tuple[int, int], grid: tuple[int, int], geometry: Geometry) -> Tensor:
        if grid == held:
            return old
        picture = old.to(torch.promote_types(old.dtype, torch.float32)).view(1, *held, -1).permute(0, 3, 1, 2)
        resized = nn.functional.interpolate(picture, size=grid, mode="bicubic", align_corners=False)  # [1, E, R, C]
        return resized.permute(0, 2, 3, 1).flatten(0, 2)  # [R C, E]
