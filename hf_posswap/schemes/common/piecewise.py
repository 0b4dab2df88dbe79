"""What the training-free extensions share that treat near keys and far keys differently.

Near pairs keep the angles that the model was trained with; far pairs get distances that the model has met. The
schemes differ in where the border lies and in the positions that each side is given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.kernels.merge import Region
from hf_posswap.rope_math import CosSin, cos_sin, default_inv_freq, rotate
from hf_posswap.schemes.base import Traits
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.common.piece import Keys, LateTable, Piece, side_by_side
from hf_posswap.schemes.rope import RotaryMechanism, RotaryScheme, own_theta


@dataclass(frozen=True)
class Part:
    """Which pairs, and the positions that their query and key are given.

    Attributes:
        query: of positions [B or 1, Q]: those to rotate by; whole or not.
        key: of positions [B or 1, K]; None: keys are rotated by `Piecewise.cached_key` before they are cached.
        region: which pairs belong here.
    """

    query: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], Tensor] | None
    region: Region


@dataclass(frozen=True)
class Piecewise(RotaryScheme):
    """Rotary attention in parts. Angles are the model's own, its scaling included, unless `base` is given.

    Attributes:
        original_length: L, in tokens; None takes the length that the model was made for.
    """

    only_rotates: ClassVar[bool] = False

    original_length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.original_length is not None:
            checks.length(self.name, "original_length", self.original_length)

    @property
    def traits(self) -> Traits:
        return Traits(causal_only=True, relative=False, training_free=True)

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        if resolved.base is None and geometry.base is not None and geometry.frequencies is None:
            raise SchemeError(
                f"{self.name}: the model's own angles follow the length of its input, so there are none to keep; give "
                "base= (theta) for plain ones."
            )
        return dataclasses.replace(resolved, original_length=self.original_length or geometry.original_length)

    def _model_base(self, geometry: Geometry) -> float | None:
        own_width = self.partial is None or round(geometry.head_dim * self.partial) == geometry.rotary_dim
        return self.base if geometry.base is not None and own_width else super()._model_base(geometry)

    def theta(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        if self.base is None:
            return own_theta(geometry, dtype)
        return default_inv_freq(self.base, self.rotary_dim(geometry), dtype)

    def attention_scaling(self, geometry: Geometry) -> float:
        return geometry.attention_factor if self.base is None else 1.0

    def parts(self) -> tuple[Part, ...]:
        """Return the parts of a resolved scheme; each pair with key <= query belongs to one."""
        raise NotImplementedError

    def cached_key(self, positions: Tensor) -> Tensor:
        """Return the positions by which keys at `positions` are rotated before they are cached."""
        raise NotImplementedError(f"{self.name}: keys are cached raw.")

    def mechanism(self, geometry: Geometry) -> PiecewiseMechanism:
        return PiecewiseMechanism(self, geometry)


class PiecewiseMechanism(RotaryMechanism):
    """Splits attention into the parts of a scheme."""

    splits = True
    scheme: Piecewise

    def __init__(self, scheme: Piecewise, geometry: Geometry) -> None:
        super().__init__(scheme, geometry)
        self.regions = tuple(part.region for part in scheme.parts())
        self.rotates = any(part.key is None for part in scheme.parts())
        self.keys_per_token = 1 if self.rotates else len(self.regions)
        self.turns_on = not self.rotates

    def prepare(self, positions: Tensor, length: Tensor) -> Any:
        if self.rotates:
            return self._turn(self.scheme.cached_key(positions))
        return tuple(self._turn(part.key(positions)) for part in self.scheme.parts() if part.key is not None)

    def rotate_query(self, query: Tensor, prepared: Any) -> Tensor:
        return query  # each piece rotates it in its own way

    def rotate_key(self, key: Tensor, prepared: Any) -> Tensor:
        return rotate(key, prepared, self.layout) if self.rotates else side_by_side(key, prepared, self.layout)

    def rotate_far(self, key: Tensor, prepared: Any) -> Tensor:
        return rotate(key, prepared[-1], self.layout)

    def pieces(self, query_positions: Tensor, key_positions: Tensor, *, keys: Keys = "raw") -> tuple[Piece, ...]:
        copied, parts = keys == "copies", self.scheme.parts()
        return tuple(
            Piece(
                query=self._turn(part.query(query_positions)),
                key=self._key_table(part, key_positions, keys),
                layout=self.layout,
                pairs=part.region,
                copy=number if copied else 0,
                keys_per_token=self.keys_per_token if copied else 1,
            )
            for number, part in enumerate(parts)
        )

    def _key_table(self, part: Part, positions: Tensor, keys: Keys) -> CosSin | LateTable | None:
        """Return what rotates keys that come as `keys` says for `part`; None: nothing needs to."""
        own, far = part.key, self.scheme.parts()[-1]
        if own is None or keys == "copies" or (keys == "far" and part.region == far.region):
            return None
        if keys != "far":
            return self._turn(own(positions))
        had = far.key
        assert had is not None, "keys that were turned for the far part"
        return LateTable(positions, lambda at: self._turn(own(at)), lambda at: self._turn(had(at)))

    def _turn(self, positions: Tensor) -> CosSin:
        return cos_sin(positions, self.fixed(positions.device))


@dataclass(frozen=True)
class Windowed(Piecewise):
    """A scheme of two parts: exact distances below a window, others from there on.

    Attributes:
        window: w, distances below which are exact, in tokens, less than L; None takes a quarter of L.
    """

    window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None:
            checks.length(self.name, "window", self.window)

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        original = resolved.filled("original_length")
        window = max(1, original // 4) if self.window is None else self.window
        if window >= original:
            raise SchemeError(
                f"{self.name}: window must be less than the original length, {original} tokens, got {window}: with all "
                "of it exact nothing would be extended."
            )
        return dataclasses.replace(resolved, window=window)

    @property
    def exact_below(self) -> int | None:
        return self.window

    def parts(self) -> tuple[Part, ...]:
        window = self.filled("window")
        return Part(itself, itself, Region(1, 0, window)), self.far(window)

    def far(self, window: int) -> Part:
        """Return the part of pairs that are `window` tokens apart or more."""
        raise NotImplementedError


def farther_than(window: int) -> Region:
    """Return the pairs that are `window` tokens apart or more, the key in the query's past."""
    return Region(1, window, None)


def itself(positions: Tensor) -> Tensor:
    """Return `positions`."""
    return positions
