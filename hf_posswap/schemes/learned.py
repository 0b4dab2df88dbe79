"""Learned tables: of tokens, kept, extended by a rule or at random, or drawn anew; of patches, fitted to an image size.

Of patches: Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929, section 3.2: "2D interpolation of the pre-trained
position embeddings, according to their location in the original image".
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes.base import SCHEMES
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.common.table import GridTable, TableScheme

EXTENSIONS = ("tile", "interpolate", "group", "hierarchical", "random", "reinit")
_DRAWN = ("random", "reinit")
_USUAL_STD = 0.02  # of the first table of BERT and GPT-2


@SCHEMES.register("learned")
@dataclass(frozen=True)
class Learned(TableScheme):
    """A learned table of L rows, extended to P.

    With k = P/L: "tile" new[p] = old[p mod L]; "interpolate" new[k p] = old[p], linear between, the last row repeated
    beyond it; "group" new[p] = old[floor(p/k)]; "hierarchical" (Su 2020, https://kexue.fm/archives/7947)
    u_0 = old_0 and u_p = (old_p - a old_0)/(1 - a), new[p] = a u[p div L] + (1 - a) u[p mod L], up to L^2 rows;
    "random" new[p] drawn from N(0, std^2) where p >= L; "reinit" draws every row, as before any training. The first L
    rows stay as they were under "tile", "hierarchical" and "random".

    Attributes:
        extend: the rule for rows beyond the old table; "reinit" for all of them.
        alpha: a of "hierarchical", in (0, 1), not 0.5.
        std: standard deviation of drawn rows; None takes that of the old table.
        seed: of drawn rows.

    Example:
        >>> Learned(extend="hierarchical").alpha
        0.4
    """

    name: ClassVar[str] = "learned"
    summary: ClassVar[str] = "a learned table, kept or extended: tile, interpolate, group, hierarchical, random"
    source: ClassVar[str] = "https://arxiv.org/abs/1706.03762"

    extend: Literal["tile", "interpolate", "group", "hierarchical", "random", "reinit"] = "tile"
    alpha: float = 0.4
    std: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        checks.choice(self.name, "extend", self.extend, EXTENSIONS)
        checked = checks.number(self.name, "alpha", self.alpha)
        if not 0.0 < checked < 1.0 or checked == 0.5:
            raise SchemeError(f"{self.name}: alpha must lie in (0, 1) and not be 0.5, got {self.alpha!r}.")
        object.__setattr__(self, "alpha", checked)
        if self.std is not None:
            object.__setattr__(self, "std", checks.number(self.name, "std", self.std, above=0.0))
            if self.extend not in _DRAWN:
                raise SchemeError(
                    f"{self.name}: std applies to drawn rows, but extend={self.extend!r} draws none; leave it out, or "
                    "give extend='random' or 'reinit'."
                )
        checks.whole(self.name, "seed", self.seed, minimum=0, maximum=checks.LARGEST_SEED)

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        super().resolve(geometry, max_length)
        old, new = geometry.original_length, self.rows(geometry, max_length)
        if new < old:
            raise SchemeError(
                f"{self.name}: max_length {new} is shorter than the model's {old} positions; "
                "leave it out to keep its table."
            )
        if self.extend == "hierarchical" and new > old * old:
            raise SchemeError(
                f"{self.name}: hierarchical reaches {old * old} positions from {old}, but max_length is {new}; "
                "give a smaller one, or another rule of extend."
            )
        return self

    def fit(self, old: Tensor, rows: int, geometry: Geometry) -> Self:
        if self.extend not in _DRAWN or self.std is not None:
            return self
        std = old.detach().cpu().double().std(correction=0).item()
        if not math.isfinite(std):
            raise SchemeError(
                f"{self.name}: the old table, whose spread drawn rows would take, has NaN or infinite values; repair "
                "it, or give std."
            )
        return dataclasses.replace(self, std=std or _USUAL_STD)

    def rows_at(self, positions: Tensor, old: Tensor, rows: int, geometry: Geometry) -> Tensor:
        old = old.detach().cpu()
        old = old.to(torch.promote_types(old.dtype, torch.float32))  # [L, E]
        count = old.shape[0]
        if self.extend in _DRAWN:
            return self._drawn(old, rows)[positions]
        if rows == count or self.extend == "tile":
            return old[positions % count]
        if self.extend == "group":
            return old[positions * count // rows]
        if self.extend == "hierarchical":
            basis = (old - self.alpha * old[:1]) / (1 - self.alpha)
            new = self.alpha * basis[positions // count] + (1 - self.alpha) * basis[positions % count]
            # for the first rows the formula gives the old ones up to rounding
            return torch.where((positions < count)[:, None], old[positions % count], new)
        source = positions.double() * count / rows  # the old position that new position p maps to
        low = source.floor().long().clamp(max=count - 1)
        high = (low + 1).clamp(max=count - 1)
        weight = (source - low).to(old.dtype)[:, None]
        return torch.lerp(old[low], old[high], weight)

    def _drawn(self, old: Tensor, rows: int) -> Tensor:
        """Return `rows` drawn rows; unless all are to be new, the first ones are the `old` rows."""
        generator = torch.Generator().manual_seed(self.seed)
        new = self.filled("std") * torch.randn(rows, old.shape[1], generator=generator, dtype=old.dtype, device="cpu")
        if self.extend == "random":
            new[: len(old)] = old
        return new


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

    def table(self, old: Tensor, old_grid: tuple[int, int], grid: tuple[int, int], geometry: Geometry) -> Tensor:
        if grid == old_grid:
            return old
        picture = old.to(torch.promote_types(old.dtype, torch.float32)).view(1, *old_grid, -1).permute(0, 3, 1, 2)
        resized = nn.functional.interpolate(picture, size=grid, mode="bicubic", align_corners=False)  # [1, E, R, C]
        return resized.permute(0, 2, 3, 1).flatten(0, 2)  # [R C, E]
