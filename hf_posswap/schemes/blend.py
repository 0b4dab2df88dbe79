"""The gradual swap: a weighted mix of a model's own mechanism and a new one; training shifts the weight."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.kernels.piecewise_bias import PiecewiseBias
from hf_posswap.rope_math import CosSin, Frequencies, cos_sin, rotate, stock_cos_sin
from hf_posswap.schemes.alibi import Alibi
from hf_posswap.schemes.base import SCHEMES, Kind, Scheme, Traits, make_scheme
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.schemes.rope import Rope, RotaryScheme, own_theta


@SCHEMES.register("blend")
@dataclass(frozen=True)
class Blend(Scheme):
    """The model's own mechanism with weight 1 - w, the new one with weight w: the old model at 0, the new one at 1.

    Rows of the old and the new position table, and a bias, are scaled by their weight. A rotation uses the angles
    (1 - w) theta_old + w theta_new, where a mechanism that does not rotate has theta = 0. Change w with `set_blend`
    while training; `finish_blend` leaves only the new mechanism.

    Attributes:
        new: the scheme to end with (an object, a name or a dict).
        weight: w, in [0, 1].
        old: "table" or "rotary", the mechanism that the model has; None detects it.

    Example:
        >>> Blend(new="rope", weight=0.25).weight
        0.25
    """

    name: ClassVar[str] = "blend"
    summary: ClassVar[str] = "the old mechanism and a new one, in shares that training moves"
    source: ClassVar[str] = "https://arxiv.org/abs/2512.12167"
    kind: ClassVar[Kind] = "mixed"

    new: Scheme = Rope()
    weight: float = 0.0
    old: Literal["table", "rotary"] | None = None

    def __post_init__(self) -> None:
        new = make_scheme(self.new)
        if not new.standalone:
            raise SchemeError(
                f"{self.name}: new must be a scheme by itself, because it is all that stays at the end, and {new.name} "
                "is only a term of a sum. What works: the sum without blend."
            )
        if new.kind == "mixed":
            raise SchemeError(f"{self.name}: new must be one scheme, not several in one, got {new}.")
        object.__setattr__(self, "new", new)
        checked = checks.number(self.name, "weight", self.weight, minimum=0.0, maximum=1.0)
        object.__setattr__(self, "weight", checked)
        if self.old is not None:
            checks.choice(self.name, "old", self.old, ("table", "rotary"))

    @classmethod
    def stand_ins(cls, geometry: Geometry) -> dict[str, object]:
        return {"new": Alibi(), "weight": 0.5}

    @property
    def traits(self) -> Traits:
        steady = self.old != "table"
        traits = self.new.traits
        relative, unbounded = traits.relative and steady, traits.unbounded and steady
        return dataclasses.replace(traits, relative=relative, unbounded=unbounded, training_free=False)

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        super().resolve(geometry, max_length)
        old: Literal["table", "rotary"] = "table" if geometry.base is None else "rotary"
        if self.old not in (None, old):
            raise SchemeError(f"{self.name}: old={self.old!r}, but the model has a {old}.")
        if old == "table" and max_length is not None and max_length > geometry.original_length:
            raise SchemeError(
                f"{self.name}: the old table, which is still in use, ends at {geometry.original_length} positions, but "
                f"max_length is {max_length}; blend within it, and lengthen afterwards: finish_blend(model, "
                f"max_length={max_length})."
            )
        if old == "rotary" and geometry.frequencies is None:
            raise SchemeError(f"{self.name}: the model's own angles follow the length of its input: they cannot fade.")
        new = self.new.resolve(geometry, max_length)
        self._check_rotation(new, geometry)
        return dataclasses.replace(self, new=new, old=old)

    def _check_rotation(self, new: Scheme, geometry: Geometry) -> None:
        if new.kind == "rotary" and not (isinstance(new, RotaryScheme) and new.is_fixed):
            raise SchemeError(
                f"{self.name}: {new} is not a fixed set of angles, so there is nothing to blend them into."
            )
        if not isinstance(new, RotaryScheme) or geometry.base is None:
            return
        if (new.layout, new.rotary_dim(geometry)) != (geometry.layout or new.layout, geometry.rotary_dim):
            raise SchemeError(
                f"{self.name}: the new rotation must turn the pairs that the old one turns ({geometry.rotary_dim} "
                f"dimensions, {geometry.layout}), got {new}."
            )

    def reach(self, geometry: Geometry) -> int | None:
        return self.new.reach(geometry) if self.old == "rotary" else geometry.original_length

    def notes(self) -> tuple[str, ...]:
        return (f"{self.weight:.0%} of the way to {self.new}: move on with set_blend, end with finish_blend",)

    def mechanism(self, geometry: Geometry) -> BlendMechanism:
        return BlendMechanism(self, geometry)


class BlendMechanism(Mechanism):
    """The part of a blend that acts inside attention. `weight` is set by `set_blend`."""

    def __init__(self, scheme: Blend, geometry: Geometry) -> None:
        super().__init__()
        self.weight, self.head_dim = scheme.weight, geometry.head_dim
        self.new = scheme.new.mechanism(geometry) if scheme.new.acts_inside else None
        self.learns_slopes = self.new is not None and self.new.learns_slopes
        self._old = self._new = None
        if scheme.old == "rotary":
            native = torch.tensor(geometry.frequencies, dtype=torch.float32, device="cpu")
            self._old = Frequencies.of(own_theta(geometry, torch.float64), native, geometry.attention_factor)
        self.layout = geometry.layout or "half"
        if isinstance(scheme.new, RotaryScheme):
            self._new = scheme.new.angles(geometry)
            self.layout = scheme.new.filled("layout")
        self.rotates = self._old is not None or self._new is not None

    @property
    def biases(self) -> bool:  # type: ignore[override]
        """Whether a bias is added: not at weight 0, where the new mechanism is inactive."""
        return self.new is not None and self.new.biases and self.weight > 0

    @property
    def distance_only(self) -> bool:  # type: ignore[override]
        """Whether the bias is a function of the distance alone."""
        return self.new is not None and self.new.distance_only

    @property
    def piecewise(self) -> bool:  # type: ignore[override]
        """Whether the bias is piecewise linear in a share of distance and query position."""
        return self.new is not None and self.new.piecewise

    @property
    def slopes(self) -> Tensor | None:  # type: ignore[override]
        """Those of the new mechanism, times its weight."""
        slopes = None if self.new is None else self.new.slopes
        return None if slopes is None else self.weight * slopes

    @property
    def scales(self) -> bool:  # type: ignore[override]
        """Whether queries are multiplied."""
        return self.new is not None and self.new.scales and self.weight > 0

    def angles(self) -> Frequencies:
        """Return (1 - w) theta_old + w theta_new, and the factor on cos and sin with the same weights."""
        still = Frequencies(torch.zeros_like((self._old or self._new or Frequencies(torch.zeros(0))).inv_freq))
        old, new, w = self._old or still, self._new or still, self.weight
        mixed = (1 - w) * old.exact + w * new.exact
        rounded = (1 - w) * old.inv_freq + w * new.inv_freq
        return Frequencies.of(mixed, rounded, (1 - w) * old.attention_factor + w * new.attention_factor)

    def prepare(self, positions: Tensor, length: Tensor) -> CosSin:
        if self._old is not None and self.weight in (0, 1):  # exactly the stock model, old or new
            return stock_cos_sin(positions, self.angles().to(positions.device))
        return cos_sin(positions, self.angles().to(positions.device))

    def rotate_query(self, query: Tensor, prepared: CosSin) -> Tensor:
        return rotate(query, prepared, self.layout)

    def rotate_key(self, key: Tensor, prepared: CosSin) -> Tensor:
        return rotate(key, prepared, self.layout)

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        assert self.new is not None
        return self.weight * self.new.bias(query_positions, key_positions)

    def distance_bias(self, distances: Tensor) -> Tensor:
        assert self.new is not None
        return self.weight * self.new.distance_bias(distances)

    def piecewise_bias(self, distances: Tensor, query_positions: Tensor) -> PiecewiseBias:
        assert self.new is not None
        bias, w = self.new.piecewise_bias(distances, query_positions), self.weight
        return bias._replace(offsets=w * bias.offsets, slopes=w * bias.slopes, bends=w * bias.bends)

    def scale(self, query_positions: Tensor) -> Tensor:
        assert self.new is not None
        return 1 + self.weight * (self.new.scale(query_positions) - 1)

    def extra_repr(self) -> str:
        return f"weight={self.weight:g}"
