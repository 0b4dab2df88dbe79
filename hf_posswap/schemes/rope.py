"""Rotary position embedding, of tokens and of patches, and the base of every scheme that rotates queries and keys.

q_m and k_n are rotated, pair i by the angle position * theta_i with theta_i = base^(-2i/R), so that their product
depends on m - n alone. Su et al. 2021, https://arxiv.org/abs/2104.09864, equations 14 to 16. Of patches, half of the
pairs turn by the row, half by the column: Heo et al. 2024, https://arxiv.org/abs/2403.13298, section 3.2, equation 9.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry, Layout
from hf_posswap.rope_math import CosSin, Frequencies, cos_sin, default_inv_freq, rotate, stock_cos_sin, widest
from hf_posswap.schemes.base import SCHEMES, Input, Kind, Scheme, Traits
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.common.table import row_and_column
from hf_posswap.schemes.mechanism import Mechanism

DEFAULT_BASE = 10000.0


@dataclass(frozen=True, kw_only=True)
class RotaryScheme(Scheme):
    """Base of all rotary schemes: a base, a width, a layout and frequencies.

    Attributes:
        base: theta; None keeps the model's own, 10000 where it has none.
        partial: the share of each head that is rotated, in (0, 1]; None keeps the model's own, 1 where it has none.
        layout: how pairs lie in a head, "half" or "interleaved"; None keeps the model's own, "half" where it has none.
    """

    kind: ClassVar[Kind] = "rotary"
    only_rotates: ClassVar[bool] = True
    """Whether the angles define the whole mechanism: q and k are rotated and not changed otherwise."""

    base: float | None = None
    partial: float | None = None
    layout: Layout | None = None

    def __post_init__(self) -> None:
        if self.base is not None:
            checked = checks.number(self.name, "base", self.base, above=1.0, maximum=checks.LARGEST)
            object.__setattr__(self, "base", checked)
        if self.partial is not None:
            checked = checks.number(self.name, "partial", self.partial, above=0.0, maximum=1.0)
            object.__setattr__(self, "partial", checked)
        if self.layout is not None:
            checks.choice(self.name, "layout", self.layout, ("half", "interleaved"))

    @property
    def length_dependent(self) -> bool:
        """Whether frequencies follow the current length, so that cached keys must stay unrotated."""
        return False

    @property
    def is_fixed(self) -> bool:
        """Whether `angles` define the whole mechanism: the same for every length and position, q and k only rotated."""
        same_everywhere = type(self).turns is RotaryScheme.turns or self.traits.relative
        return self.only_rotates and not self.length_dependent and same_everywhere

    @property
    def traits(self) -> Traits:
        steady = not self.length_dependent
        return Traits(relative=True, training_free=True, prefix_consistent=steady, shardable=steady)

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        super().resolve(geometry, max_length)
        if self.partial is None:
            width = geometry.rotary_dim or geometry.head_dim
        else:
            width = round(geometry.head_dim * self.partial)
        if width < 2 or width % 2:
            raise SchemeError(
                f"{self.name}: rotation needs an even number of dimensions a head, at least 2, but head_dim "
                f"{geometry.head_dim} with partial={self.partial} gives {width}; choose partial so that "
                "head_dim * partial is even."
            )
        return dataclasses.replace(
            self,
            base=self._model_base(geometry),
            partial=width / geometry.head_dim,
            layout=self.layout or geometry.layout or "half",
        )

    def _model_base(self, geometry: Geometry) -> float | None:
        return self.base or geometry.base or DEFAULT_BASE

    def rotary_dim(self, geometry: Geometry) -> int:
        """Return R, the rotated dimensions of a head, of a resolved scheme."""
        return round(geometry.head_dim * self.filled("partial"))

    def angles(self, geometry: Geometry, length: Tensor | None = None) -> Frequencies:
        """Return theta_i of a resolved scheme, radians per position.

        Args:
            geometry: of the model.
            length: tokens seen so far, any shape that ends in 1 (only length-dependent schemes read it); None means the
                original length.

        Returns:
            inv_freq [R/2], or [..., R/2] where it depends on the length, float32; and the factor on cos and sin.
        """
        exact, rounded = (
            self.theta(geometry, length, dtype)
            for dtype in (torch.float64 if length is None else widest(length.device), torch.float32)
        )
        return Frequencies.of(exact, rounded, self.attention_scaling(geometry))

    def theta(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return theta_i as `angles` does, computed in `dtype`: in float32 with the operations of stock transformers.

        The rotation uses float64, so that far positions are exact.
        """
        raise NotImplementedError

    def attention_scaling(self, geometry: Geometry) -> float:
        """Return the factor on cos and sin of a resolved scheme."""
        return 1.0

    def turns(self, positions: Tensor, angles: Frequencies, geometry: Geometry) -> CosSin:
        """Return cos and sin of `angles` at `positions` [B or 1, Q]."""
        return cos_sin(positions, angles)

    def native_rope(self, geometry: Geometry) -> dict[str, object] | None:
        """Return the `rope_parameters` with which stock transformers computes the same; None where it cannot."""
        return None

    def native_list(self, geometry: Geometry) -> dict[str, object] | None:
        """Return the `rope_parameters` that list fixed angles pair by pair; None if a pair does not turn.

        Rope type "longrope" divides each theta_i by its own factor. With the same factors within the original length
        and beyond it, a stock config can express any fixed angles above 0.
        """
        angles = self.angles(geometry)
        if not bool((angles.inv_freq > 0).all()):
            return None
        base = self.base or geometry.base or DEFAULT_BASE
        divisors = (default_inv_freq(base, self.rotary_dim(geometry), torch.float64) / angles.exact).tolist()
        return {
            "rope_type": "longrope",
            "rope_theta": base,
            "factor": 1.0,
            "original_max_position_embeddings": geometry.original_length,
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": angles.attention_factor,
        }

    def mechanism(self, geometry: Geometry) -> RotaryMechanism:
        return RotaryMechanism(self, geometry)


class RotaryMechanism(Mechanism):
    """Rotates q and k by a rotary scheme's frequencies."""

    rotates = True

    def __init__(self, scheme: RotaryScheme, geometry: Geometry) -> None:
        super().__init__()
        self.scheme, self.geometry, self.head_dim = scheme, geometry, geometry.head_dim
        self.layout: Layout = scheme.filled("layout")
        self.stores_rotated_keys = not scheme.length_dependent
        self._fixed = None if scheme.length_dependent else scheme.angles(geometry).to("cpu")
        self._is_native = self._fixed is not None and scheme.only_rotates and are_native(self._fixed, geometry)

    def prepare(self, positions: Tensor, length: Tensor) -> CosSin:
        if self._is_native:
            return stock_cos_sin(positions, self.fixed(positions.device))
        angles = self.scheme.angles(self.geometry, length) if self._fixed is None else self.fixed(positions.device)
        return self.scheme.turns(positions, angles, self.geometry)

    def fixed(self, device: torch.device) -> Frequencies:
        """Return the angles of a scheme whose angles do not follow the length, on `device`."""
        assert self._fixed is not None, "these angles follow the length"
        if self._fixed.inv_freq.device != device:
            self._fixed = self._fixed.to(device)
        return self._fixed

    def rotate_query(self, query: Tensor, prepared: CosSin) -> Tensor:
        return rotate(query, prepared, self.layout)

    def rotate_key(self, key: Tensor, prepared: CosSin) -> Tensor:
        return rotate(key, prepared, self.layout)

    def extra_repr(self) -> str:
        return str(self.scheme)


@SCHEMES.register("rope")
@dataclass(frozen=True, kw_only=True)
class Rope(RotaryScheme):
    """Plain RoPE: theta_i = base^(-2i/R), or angles of your own. Raising the base is "ABF" (Xiong et al. 2023).

    Attributes:
        frequencies: theta_i of each of the R/2 pairs, radians per position, >= 0 (a pair of 0 does not turn); replaces
            those that the base gives.

    Example:
        >>> Rope(base=500000.0)
        Rope(base=500000.0, partial=None, layout=None, frequencies=None)
        >>> Rope(frequencies=[1.0, 0.1]).frequencies
        (1.0, 0.1)
    """

    name: ClassVar[str] = "rope"
    summary: ClassVar[str] = "rotary embedding; base, width, layout and angles of your choice"
    source: ClassVar[str] = "https://arxiv.org/abs/2104.09864"

    frequencies: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frequencies is None:
            return
        checked = checks.factors(self.name, "frequencies", self.frequencies, zero=True)
        object.__setattr__(self, "frequencies", checked)
        if self.base is not None:
            raise SchemeError(
                f"{self.name}: frequencies replace those that a base gives, got base={self.base:g} as well; give "
                "one of the two."
            )

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, training_free=self.frequencies is None)

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        pairs = resolved.rotary_dim(geometry) // 2
        if self.frequencies is not None and len(self.frequencies) != pairs:
            raise SchemeError(
                f"{self.name}: frequencies needs one number for each of this model's {pairs} rotary pairs, got "
                f"{len(self.frequencies)}."
            )
        return resolved

    def _model_base(self, geometry: Geometry) -> float | None:
        return None if self.frequencies is not None else super()._model_base(geometry)

    def theta(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        if self.frequencies is not None:
            return torch.tensor(self.frequencies, dtype=dtype, device="cpu")
        return default_inv_freq(self.filled("base"), self.rotary_dim(geometry), dtype)

    def native_rope(self, geometry: Geometry) -> dict[str, object] | None:
        if self.frequencies is not None:
            return self.native_list(geometry)
        return {"rope_type": "default", "rope_theta": self.filled("base")}


def own_rope(owner: str, geometry: Geometry) -> Rope:
    """Return the native rotation of a model, its scaling included; plain RoPE if it has none.

    Raises:
        SchemeError: fixed angles cannot express it: it follows the length, or also scales cos and sin.
    """
    if geometry.base is None:
        return Rope()
    if geometry.frequencies is None or geometry.attention_factor != 1.0:
        raise SchemeError(
            f"{owner}: the model's own rotation is not a plain one (it follows the length, or scales cos and sin), so "
            "it cannot be kept; choose one: rotary=..., for example Rope() or Yarn(factor=...)."
        )
    if _are_of_the_base(geometry):
        return Rope(base=geometry.base)
    return Rope(frequencies=geometry.frequencies)


def are_native(angles: Frequencies, geometry: Geometry) -> bool:
    """Return whether `angles` equal the native angles of a model, up to float32 rounding."""
    native = geometry.frequencies
    same_factor = angles.attention_factor == geometry.attention_factor
    if native is None or not same_factor or len(native) != len(angles.inv_freq):
        return False
    return all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(angles.inv_freq.tolist(), native, strict=True))


def own_theta(geometry: Geometry, dtype: torch.dtype) -> Tensor:
    """Return the native theta_i of a model, [R/2]; for plain RoPE, float64 is computed from its base."""
    assert geometry.frequencies is not None, "the model's own angles follow the length"
    if _are_of_the_base(geometry):
        assert geometry.base is not None
        return default_inv_freq(geometry.base, 2 * len(geometry.frequencies), dtype)
    return torch.tensor(geometry.frequencies, dtype=dtype, device="cpu")


def _are_of_the_base(geometry: Geometry) -> bool:
    """Return whether the model's own angles are those of plain RoPE, as stock transformers rounds them."""
    if geometry.base is None or geometry.frequencies is None:
        return False
    return default_inv_freq(geometry.base, 2 * len(geometry.frequencies)).tolist() == list(geometry.frequencies)


@dataclass(frozen=True, kw_only=True)
class OwnRotary(RotaryScheme):
    """Base of rotary schemes whose angles are the model's own, its scaling included, unless `base` is given."""

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        if resolved.base is None and geometry.base is not None and geometry.frequencies is None:
            raise SchemeError(
                f"{self.name}: the model's own angles follow the length of its input, so they cannot be kept; give "
                "base= (theta) for plain angles."
            )
        return resolved

    def _model_base(self, geometry: Geometry) -> float | None:
        own_width = self.partial is None or round(geometry.head_dim * self.partial) == geometry.rotary_dim
        return self.base if geometry.base is not None and own_width else super()._model_base(geometry)

    def theta(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        if self.base is None:
            return own_theta(geometry, dtype)
        return default_inv_freq(self.base, self.rotary_dim(geometry), dtype)

    def attention_scaling(self, geometry: Geometry) -> float:
        return geometry.attention_factor if self.base is None else 1.0


@SCHEMES.register("rope_2d")
@dataclass(frozen=True)
class Rope2D(Scheme):
    """Of the R/2 rotary pairs, i < R/4 turn by row * theta_i and i >= R/4 by column * theta_(i - R/4).

    theta_i = base^(-4i/R), i = 0..R/4-1. A score depends only on how many rows and columns lie between two
    patches. Tokens without a patch (class, distillation) do not turn.

    Attributes:
        base: of the angles; 100 is the paper's: an image has far fewer rows than a text has tokens.
        partial: the share of each head that is rotated, in (0, 1].
        layout: how pairs lie in a head: "half" pairs (i, i + R/2), "interleaved" pairs (2i, 2i + 1).

    Example:
        >>> Rope2D(base=10000.0).traits.relative
        True
    """

    name: ClassVar[str] = "rope_2d"
    summary: ClassVar[str] = "rotary embedding of rows and columns, each with half of the pairs"
    source: ClassVar[str] = "https://arxiv.org/abs/2403.13298"
    kind: ClassVar[Kind] = "rotary"
    inputs: ClassVar[tuple[Input, ...]] = ("images",)

    base: float = 100.0
    partial: float = 1.0
    layout: Layout = "half"

    def __post_init__(self) -> None:
        checked = checks.number(self.name, "base", self.base, above=1.0, maximum=checks.LARGEST)
        object.__setattr__(self, "base", checked)
        checked = checks.number(self.name, "partial", self.partial, above=0.0, maximum=1.0)
        object.__setattr__(self, "partial", checked)
        checks.choice(self.name, "layout", self.layout, ("half", "interleaved"))

    @property
    def traits(self) -> Traits:
        return Traits(shardable=True)

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        width = round(geometry.head_dim * self.partial)
        if width < 4 or width % 4:
            raise SchemeError(
                f"{self.name}: rotation by row and column needs a multiple of 4 dimensions a head, but head_dim "
                f"{geometry.head_dim} with partial={self.partial:g} gives {width}; choose partial so that 4 divides "
                "head_dim * partial."
            )
        return dataclasses.replace(resolved, partial=width / geometry.head_dim)

    def mechanism(self, geometry: Geometry) -> Rope2DMechanism:
        return Rope2DMechanism(self, geometry)


class Rope2DMechanism(Mechanism):
    """Rotates q and k by the row and column of their patches."""

    rotates = True

    def __init__(self, scheme: Rope2D, geometry: Geometry) -> None:
        super().__init__()
        self.scheme, self.head_dim = scheme, geometry.head_dim
        theta = default_inv_freq(scheme.base, round(geometry.head_dim * scheme.partial) // 2, torch.float64)  # [R/4]
        self.frequencies = Frequencies.of(theta).to("cpu")

    def prepare(self, positions: Tensor, length: Tensor) -> CosSin:
        if self.frequencies.inv_freq.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        rows, columns, _ = row_and_column(positions)
        by_row, by_column = (cos_sin(axis, self.frequencies) for axis in (rows, columns))  # [B, 1, Q, R/4]
        return CosSin(torch.cat((by_row.cos, by_column.cos), dim=-1), torch.cat((by_row.sin, by_column.sin), dim=-1))

    def rotate_query(self, query: Tensor, prepared: CosSin) -> Tensor:
        return rotate(query, prepared, self.scheme.layout)

    def rotate_key(self, key: Tensor, prepared: CosSin) -> Tensor:
        return rotate(key, prepared, self.scheme.layout)

    def extra_repr(self) -> str:
        return str(self.scheme)
