"""Sinusoidal tables: of tokens, that of the first transformer; of columns and rows, that of MAE and MoCo v3.

Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.5. Columns and rows: He et al. 2021,
https://arxiv.org/abs/2111.06377, appendix A.1; the authors' code,
https://github.com/facebookresearch/mae/blob/main/util/pos_embed.py. Ridge regression of a learned table on the rows of
a formula: Hoerl and Kennard 1970, https://doi.org/10.1080/00401706.1970.10488634.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes.base import SCHEMES
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.common.table import GridTable, TableScheme

_SMALLEST = 1e-8
"""Relative to the largest singular value: smaller ones are directions that a fit cannot have used."""


def ridge_map(features: Tensor, targets: Tensor, penalty: float) -> Tensor:
    """Return W = argmin ||X W - Y||^2 + penalty ||W||^2, [F, E], float64.

    Of the two equal forms, (X'X + penalty I)^-1 X'Y and X'(XX' + penalty I)^-1 Y, the one with the smaller system is
    solved.

    Args:
        features: X, [L, F], float64.
        targets: Y, [L, E], float64.
        penalty: above 0.

    Example:
        >>> ridge_map(torch.eye(2).double(), torch.tensor([[3.0], [6.0]]).double(), 2.0).flatten().tolist()
        [1.0, 2.0]
    """
    count, width = features.shape
    if count < width:
        gram = features @ features.T + penalty * torch.eye(count, dtype=torch.float64, device="cpu")
        return features.T @ torch.linalg.solve(gram, targets)
    gram = features.T @ features + penalty * torch.eye(width, dtype=torch.float64, device="cpu")
    return torch.linalg.solve(gram, features.T @ targets)


def in_span(rows: Tensor, features: Tensor) -> Tensor:
    """Return the projection of `rows` onto linear maps of `features` plus a constant row.

    Args:
        rows: [P, E], float64.
        features: [P, F], float64.

    Returns:
        The nearest such rows, [P, E], float64.

    Example:
        >>> line = torch.arange(3, dtype=torch.float64)[:, None]
        >>> in_span(torch.tensor([[1.0], [0.0], [2.0]]).double(), line).flatten().round(decimals=6).tolist()
        [0.5, 1.0, 1.5]
    """
    columns = torch.cat((features, torch.ones_like(features[:, :1])), dim=-1)  # [P, F + 1]
    weights = torch.linalg.lstsq(columns, rows, rcond=_SMALLEST, driver="gelsd").solution
    return columns @ weights


_MOST_GROWTH = 3.0
"""The largest allowed length of a ridge-fitted row beyond the old table, relative to the longest row inside it."""

S = TypeVar("S", bound=Any)


def checked_scale(owner: str, scale: object) -> float | Literal["match"]:
    """Return `scale` if it is "match" or a number above 0.

    Raises:
        SchemeError: it is neither.
    """
    if scale == "match":
        return "match"
    if isinstance(scale, str):
        raise SchemeError(f"{owner}: scale must be 'match' or a number > 0, got {scale!r}.")
    return checks.number(owner, "scale", scale, above=0.0)


def matching_scale(scheme: S, old: Tensor) -> S:
    """Return `scheme` with the scale that gives sines and cosines the root mean square of the table `old`.

    Raises:
        SchemeError: the table has NaN or infinite values.
    """
    if scheme.scale != "match":
        return scheme
    rms = old.detach().cpu().double().square().mean().sqrt().item()
    if not math.isfinite(rms):
        raise SchemeError(
            f"{scheme.name}: the table to match has NaN or infinite values; repair it, or give scale as a number."
        )
    # rows of sines and cosines have root mean square sqrt(1/2) exactly; a zero table has nothing to match
    return dataclasses.replace(scheme, scale=rms * 2**0.5 if rms > 0 else 1.0)


@SCHEMES.register("sinusoidal")
@dataclass(frozen=True)
class Sinusoidal(TableScheme):
    """PE(p, 2i) = scale sin(p base^(-2i/E)), PE(p, 2i+1) = scale cos(same).

    With `ridge`, the rows are a linear map of these sines and cosines, S(p) W + m, that starts where the old table T of
    L rows was: m is the mean of its rows, and W = argmin ||S W - (T - m)||^2 + ridge ||W||^2 over its positions (Hoerl
    and Kennard 1970, https://doi.org/10.1080/00401706.1970.10488634). The fit also defines the rows of later
    positions. With a small `ridge`, W and those rows grow: less the mean, they may be at most 3 times as long as the
    rows inside. 100 works well for a table of 256 rows, 1 and 300 almost as well: recipes/studies/starts.py.

    Attributes:
        base: of the wavelengths.
        layout: "interleaved" sines and cosines (the paper), or "halves": [sin | cos] (fairseq, Marian).
        scale: factor on the table; "match" gives it the root mean square of the table it replaces. With `ridge` it is
            the root mean square of the rows, set by the fit and checked on loading: leave it out.
        ridge: penalty of the fit, above 0, where S has entries up to 1; None: sines and cosines as they are.
        residual: set by the fit: ||S W - (T - m)|| / ||T - m||; leave it out.
        growth: set by the fit: the longest row beyond L divided by the longest inside, less m; leave it out.

    Example:
        >>> Sinusoidal(layout="halves", scale=1.0).layout
        'halves'
        >>> from hf_posswap.geometry import Geometry
        >>> shape = Geometry(
        ...     hidden_size=32, num_heads=2, num_kv_heads=2, head_dim=16, num_layers=1, original_length=64, causal=True
        ... )
        >>> learned = torch.linspace(0.0, 1.0, 64)[:, None].expand(64, 32)
        >>> Sinusoidal(ridge=1.0).fit(learned, 128, shape).residual < 0.1
        True
    """

    name: ClassVar[str] = "sinusoidal"
    summary: ClassVar[str] = "fixed sines and cosines, scaled or ridge-fitted to the table they replace"
    source: ClassVar[str] = "https://arxiv.org/abs/1706.03762"
    trainable: ClassVar[bool] = False

    base: float = 10000.0
    layout: Literal["interleaved", "halves"] = "interleaved"
    scale: float | Literal["match"] = "match"
    ridge: float | None = None
    residual: float | None = None
    growth: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", checks.number(self.name, "base", self.base, above=1.0))
        checks.choice(self.name, "layout", self.layout, ("interleaved", "halves"))
        object.__setattr__(self, "scale", checked_scale(self.name, self.scale))
        if self.ridge is not None:
            object.__setattr__(self, "ridge", checks.number(self.name, "ridge", self.ridge, above=0.0))
        for field in ("residual", "growth"):
            if (value := getattr(self, field)) is not None:
                object.__setattr__(self, field, checks.number(self.name, field, value, minimum=0.0))
        self._check_fit()

    def _check_fit(self) -> None:
        """Refuse fields that only a fit sets where there was none."""
        is_fitted = self.residual is not None
        if self.ridge is not None and is_fitted == (self.scale != "match"):
            return
        if self.ridge is not None:
            raise SchemeError(
                f"{self.name}: with ridge the fit to the old table finds scale and residual, got scale={self.scale!r} "
                f"and residual={self.residual!r}; leave both out."
            )
        if is_fitted or self.growth is not None:
            raise SchemeError(f"{self.name}: residual and growth are found by a fit, and ridge is not given.")

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        super().resolve(geometry, max_length)
        if geometry.row_width % 2:
            raise SchemeError(
                f"{self.name}: needs an even hidden size, a sine and a cosine a frequency; this model's is "
                f"{geometry.row_width}. Scheme 'learned' works with any."
            )
        return self

    def notes(self) -> tuple[str, ...]:
        if self.ridge is None:
            return ()
        if self.residual is None:
            return ("the sinusoids will be ridge-fitted to the old table, once its weights are loaded",)
        note = f"the sinusoids are ridge-fitted to the old table, with a residual of {self.residual:.0%} of its spread"
        if self.growth is not None:
            note += f"; the longest row beyond it is {self.growth:.2f} times as long as the longest inside"
        return (note,)

    def fit(self, old: Tensor, rows: int, geometry: Geometry) -> Self:
        if self.ridge is None or self.scale != "match":
            return matching_scale(self, old)
        target = old.detach().cpu().double()  # [L, E]
        if not (target.isfinite().all() and target.any()):
            wrong = "is zero everywhere" if target.isfinite().all() else "has NaN or infinite values"
            raise SchemeError(f"{self.name}: the table to fit {wrong}; repair it, or leave ridge out and give scale.")
        count, mean = len(target), target.mean(dim=0)
        fitted = self._fitted(target, max(rows, count))
        spread, left = (target - mean).norm().item(), (fitted[:count] - target).norm().item()
        lengths = (fitted - mean).norm(dim=-1)  # [max(P, L)]
        inside = lengths[:count].max().item()
        growth = None
        if rows > count:
            growth = lengths[count:].max().item() / inside if inside else 0.0
            if growth > _MOST_GROWTH:
                raise SchemeError(
                    f"{self.name}: with ridge={self.ridge:g} rows beyond the old table are up to {growth:.3g} times as "
                    f"long as those inside, the limit is {_MOST_GROWTH:g}: the fit is too close to the old rows. "
                    "Give a larger ridge."
                )
        scale = fitted[:rows].square().mean().sqrt().item()
        return dataclasses.replace(self, scale=scale, residual=left / spread if spread else 0.0, growth=growth)

    def rows_at(self, positions: Tensor, old: Tensor, rows: int, geometry: Geometry) -> Tensor:
        scale = self._scale()
        if self.ridge is not None:
            # built from its config alone, a model has another table, or uninitialized memory, until weights are loaded
            existing = old.detach().cpu().double()
            there = bool(existing.isfinite().all() and existing.any())
            fitted = self._fitted(existing, rows) if there else self.waves(rows, existing.shape[1])
            size = fitted.square().mean().sqrt().item()
            return (fitted if size == scale else fitted * (scale / size)).float()[positions]
        return (self.waves(positions, geometry.row_width) * scale).float()  # [N, E]

    def _scale(self) -> float:
        if self.scale == "match":
            raise SchemeError(f"{self.name}: scale is still 'match': call fit first, or give a number.")
        return self.scale

    def waves(self, rows: int | Tensor, width: int) -> Tensor:
        """Return S: the sines and cosines of each position, without scale, [rows, width], float64.

        Args:
            rows: how many positions, from 0; or the positions themselves, [rows].
            width: E, even.

        Example:
            >>> table = Sinusoidal().waves(128, 8)  # dimensions 2i and 2i + 1: sin and cos of p / 10000^(2i/8)
            >>> def rounded(row):
            ...     return [round(value, 3) + 0.0 for value in row.tolist()]
            >>> rounded(table[50])
            [-0.262, 0.965, -0.959, 0.284, 0.479, 0.878, 0.05, 0.999]
            >>> round(math.sin(50 / 10000 ** (2 / 8)), 3), round(math.cos(50 / 10000 ** (2 / 8)), 3)
            (-0.959, 0.284)

            The difference between positions 50 and 0, and between 99 and 50:

            >>> rounded(table[50] - table[0])
            [-0.262, -0.035, -0.959, -0.716, 0.479, -0.122, 0.05, -0.001]
            >>> rounded(table[99] - table[50])
            [-0.737, -0.925, 0.501, -1.173, 0.357, -0.329, 0.049, -0.004]

            All rows have the same norm, and the product of two depends only on their distance:

            >>> bool((table.norm(dim=1) - 2).abs().max() < 1e-12)
            True
            >>> round(float(table[0] @ table[49]), 3), round(float(table[50] @ table[99]), 3)
            (2.368, 2.368)

            Once positions are added, "the dog chases the pig" differs from "the pig chases the dog"; see `NoPE`:

            >>> words = {"the": [0.1, 0.3], "dog": [1.0, 0.2], "chases": [0.3, 1.0], "pig": [0.9, 0.0]}
            >>> def chases(sentence):  # output at "chases", with its own vector as the query
            ...     states = torch.tensor([words[word] for word in sentence.split()]) + table[:5, :2]
            ...     return (states[2] @ states.T).softmax(dim=-1) @ states
            >>> one, other = chases("the dog chases the pig"), chases("the pig chases the dog")
            >>> bool((one - other).norm() > 0.01)
            True
        """
        exponents = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width  # [E/2]
        positions = torch.arange(rows, device="cpu") if isinstance(rows, int) else rows
        angles = positions.double()[:, None] * self.base**-exponents  # [P, E/2]
        waves = (angles.sin(), angles.cos())
        if self.layout == "halves":
            return torch.cat(waves, dim=-1)
        return torch.stack(waves, dim=-1).flatten(-2)

    def _fitted(self, old: Tensor, rows: int) -> Tensor:
        """Return S(p) W + m of the table `old` [L, E], [rows, E], float64."""
        assert self.ridge is not None
        count, width = old.shape
        waves, mean = self.waves(max(rows, count), width), old.mean(dim=0)
        return waves[:rows] @ ridge_map(waves[:count], old - mean, self.ridge) + mean

    @property
    def exact(self) -> bool:
        return self.ridge is None

    def expected(self, stored: Tensor, geometry: Geometry) -> Tensor:
        """Return the rows that the table must have; W of a fit is not stored, so the nearest rows that any W gives.

        With fewer positions than wave directions, every table passes up to its scale.
        """
        if self.ridge is None:
            return super().expected(stored, geometry)
        rows = stored.double()
        if not (rows.isfinite().all() and rows.any()):
            return torch.full_like(stored, math.nan)  # no fit made these
        size = rows.square().mean().sqrt()
        near = in_span(rows, self.waves(len(rows), geometry.row_width))
        return (near * (self._scale() / size)).float()


@SCHEMES.register("sinusoidal_2d")
@dataclass(frozen=True)
class Sinusoidal2D(GridTable):
    """Row (r, c) = scale [sin(c w) | cos(c w) | sin(r w) | cos(r w)], w_i = base^(-4i/E) for i = 0..E/4-1.

    Half the width is for the column, half for the row, in the order of the authors' code. A table for any other image
    size is computed, not interpolated.

    Attributes:
        image_size: what the table is made for, in pixels: one number, or height and width; None keeps the model's own.
            Images of other sizes run in any case.
        base: of the wavelengths.
        scale: factor on the table; "match" gives it the root mean square of the table it replaces.

    Example:
        >>> Sinusoidal2D(scale=1.0).trainable
        False
    """

    name: ClassVar[str] = "sinusoidal_2d"
    summary: ClassVar[str] = "fixed sines and cosines, half of them of the column, half of the row"
    source: ClassVar[str] = "https://arxiv.org/abs/2111.06377"
    trainable: ClassVar[bool] = False

    base: float = 10000.0
    scale: float | Literal["match"] = "match"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "base", checks.number(self.name, "base", self.base, above=1.0))
        object.__setattr__(self, "scale", checked_scale(self.name, self.scale))

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        if geometry.row_width % 4:
            raise SchemeError(
                f"{self.name}: needs a hidden size that 4 divides, a sine and a cosine of a row and of a column a "
                f"frequency; this model's is {geometry.row_width}. Scheme 'learned_2d' works with any."
            )
        return resolved

    def fit(self, old: Tensor, geometry: Geometry) -> Self:
        return matching_scale(self, old)

    def table(self, old: Tensor, old_grid: tuple[int, int], grid: tuple[int, int], geometry: Geometry) -> Tensor:
        if self.scale == "match":
            raise SchemeError(f"{self.name}: scale is still 'match': call fit(old, geometry) first, or give a number.")
        width = geometry.row_width
        omega = self.base ** -(torch.arange(0, width, 4, dtype=torch.float64, device="cpu") / width)  # [E/4]
        rows, columns = (torch.arange(count, dtype=torch.float64, device="cpu")[:, None] * omega for count in grid)
        of_row, of_column = (torch.cat((angles.sin(), angles.cos()), dim=-1) for angles in (rows, columns))  # [., E/2]
        shape = (*grid, width // 2)
        table = torch.cat((of_column[None].expand(shape), of_row[:, None].expand(shape)), dim=-1)  # [R, C, E]
        return (table * self.scale).float().flatten(0, 1)
