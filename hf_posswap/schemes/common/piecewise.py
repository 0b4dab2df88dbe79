"""Base of the training-free extensions that treat near keys and far keys differently.

Near pairs keep the angles that the model was trained with; far pairs get distances that occurred in training. The
schemes differ in where the border lies and in the positions that each side gets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.kernels.merge import Region
from hf_posswap.rope_math import CosSin, cos_sin, default_inv_freq, rotate
from hf_posswap.schemes.base import Traits
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.common.piece import Keys, LateCosSin, LateTable, Piece, side_by_side
from hf_posswap.schemes.rope import RotaryMechanism, RotaryScheme, own_theta


@dataclass(frozen=True)
class RegionPositions:
    """Which pairs, and the positions that their query and key are given.

    Attributes:
        query: of positions [B or 1, Q]: those to rotate by; whole or not.
        key: of positions [B or 1, K]; None: keys are rotated by `Piecewise.cached_key` before they are cached.
        region: which pairs belong here.
        copy: index of `key` among the different ones; regions of the same copy share their keys.
    """

    query: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], Tensor] | None
    region: Region
    copy: int = 0


class Far(NamedTuple):
    """The positions of pairs that are a window apart or more: of their keys, and of a query for keys on either side.

    Attributes:
        behind: of positions [B or 1, Q]: of a query for keys in its past.
        ahead: of positions [B or 1, Q]: of a query for keys later than it.
        key: of positions [B or 1, K].
    """

    behind: Callable[[Tensor], Tensor]
    ahead: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Piecewise(RotaryScheme):
    """Rotary attention in regions. Angles are the model's own, its scaling included, unless `base` is given.

    The papers have no keys later than their query. Where a mask shows one (a bidirectional prefix, the tokens of an
    image), the pair has the distance that it has in the reversed text, with the opposite sign.

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
                f"{self.name}: the model's own angles follow the length of its input, so they cannot be kept; give "
                "base= (theta) for plain angles."
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

    def region_positions(self) -> tuple[RegionPositions, ...]:
        """Return the regions of a resolved scheme; each pair belongs to one. The last copy is that of far keys."""
        raise NotImplementedError

    def cached_key(self, positions: Tensor) -> Tensor:
        """Return the positions by which keys at `positions` are rotated before they are cached."""
        raise NotImplementedError(f"{self.name}: keys are cached raw.")

    def mechanism(self, geometry: Geometry) -> PiecewiseMechanism:
        return PiecewiseMechanism(self, geometry)


class PiecewiseMechanism(RotaryMechanism):
    """Splits attention into the regions of a scheme."""

    splits = True
    scheme: Piecewise

    def __init__(self, scheme: Piecewise, geometry: Geometry) -> None:
        super().__init__(scheme, geometry)
        regions = scheme.region_positions()
        self.regions = tuple(entry.region for entry in regions)
        self.rotates = any(entry.key is None for entry in regions)
        self.keys_per_token = 1 if self.rotates else len(_key_positions(regions))
        self.turns_on = not self.rotates

    def prepare(self, positions: Tensor, length: Tensor) -> Any:
        if self.rotates:
            return self._turn(self.scheme.cached_key(positions))
        return tuple(self._turn(key(positions)) for key in _key_positions(self.scheme.region_positions()))

    def rotate_query(self, query: Tensor, prepared: Any) -> Tensor:
        return query  # each piece rotates it itself

    def rotate_key(self, key: Tensor, prepared: Any) -> Tensor:
        return rotate(key, prepared, self.layout) if self.rotates else side_by_side(key, prepared, self.layout)

    def rotate_far(self, key: Tensor, prepared: Any) -> Tensor:
        return rotate(key, prepared[-1], self.layout)

    def pieces(self, query_positions: Tensor, key_positions: Tensor, *, keys: Keys = "raw") -> tuple[Piece, ...]:
        copied, regions = keys == "copies", self.scheme.region_positions()
        tables = [self._key_table(copy, key_positions, keys) for copy in range(len(_key_positions(regions)))]
        return tuple(
            Piece(
                query=self._query_table(entry, query_positions),
                key=None if entry.key is None else tables[entry.copy],
                layout=self.layout,
                pairs=entry.region,
                copy=entry.copy if copied else 0,
                keys_per_token=self.keys_per_token if copied else 1,
            )
            for entry in regions
        )

    def _query_table(self, entry: RegionPositions, positions: Tensor) -> CosSin | LateCosSin:
        """Return cos and sin of queries at `positions` [B or 1, Q] for a region."""
        late = LateCosSin(positions, lambda at: self._turn(entry.query(at)))
        return late if entry.region.is_ahead else late.table

    def _key_table(self, copy: int, positions: Tensor, keys: Keys) -> CosSin | LateTable | None:
        """Return cos and sin that rotate keys in the form `keys` for the regions of a copy; None: nothing to rotate."""
        known = _key_positions(self.scheme.region_positions())
        near, far = known[copy], known[-1]
        if keys == "copies" or (keys == "far" and near is far):
            return None
        if keys != "far":
            return self._turn(near(positions))
        return LateTable(positions, lambda at: self._turn(near(at)), lambda at: self._turn(far(at)))

    def _turn(self, positions: Tensor) -> CosSin:
        return cos_sin(positions, self.fixed(positions.device))


def _key_positions(regions: tuple[RegionPositions, ...]) -> list[Callable[[Tensor], Tensor]]:
    """Return the different key positions in `regions`, one per copy."""
    known = {entry.copy: entry.key for entry in regions if entry.key is not None}
    return [known[copy] for copy in sorted(known)]


@dataclass(frozen=True)
class Windowed(Piecewise):
    """A scheme with exact distances inside a window, on both sides of a query, and other distances outside it.

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
                f"{self.name}: window must be less than the original length, {original} tokens, got {window}: if "
                "all distances are exact, nothing is extended."
            )
        return dataclasses.replace(resolved, window=window)

    @property
    def exact_below(self) -> int | None:
        return self.window

    def region_positions(self) -> tuple[RegionPositions, ...]:
        window = self.filled("window")
        far = self.far(window)
        return (
            RegionPositions(itself, itself, Region(1, 1 - window, window)),
            RegionPositions(far.behind, far.key, Region(1, window, None), copy=1),
            RegionPositions(far.ahead, far.key, Region(1, None, 1 - window), copy=1),
        )

    def far(self, window: int) -> Far:
        """Return the positions of pairs that are `window` tokens apart or more."""
        raise NotImplementedError


def itself(positions: Tensor) -> Tensor:
    """Return `positions`."""
    return positions
