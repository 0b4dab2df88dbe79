"""Training-free schemes that treat near and far keys differently: Self-Extend, ReRoPE, dual chunk attention, STRING.

Near pairs keep the angles that the model was trained with; far pairs get distances that occurred in training. The
schemes differ in where the border lies and in the positions that each side gets.

Self-Extend: Jin et al. 2024, https://arxiv.org/abs/2401.01325, equations 3 and 4. ReRoPE and Leaky ReRoPE: Su 2023,
https://kexue.fm/archives/9708 (both), https://kexue.fm/archives/9731 (log scaling). Dual chunk attention: An et al.
2024, https://arxiv.org/abs/2402.17463, section 3; chunk and window as the authors' code has them
(https://github.com/HKUNLP/ChunkLlama, whose first version took L/16 for the window). STRING: An et al. 2024,
https://arxiv.org/abs/2410.18745, section 4; sizes as in its code (https://github.com/HKUNLP/STRING).

The released code of ReRoPE (https://github.com/bojone/rerope) always scales queries by the logarithm of their position,
with L = 4096; here that is `log_scaling`, off by default, with the L of the model. Its window is 512 and its slowdown
16 for every model; here they follow from L and from the requested length. The distances are the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.kernels.merge import Region
from hf_posswap.rope_math import CosSin, cos_sin, groups_of, rotate, widest
from hf_posswap.schemes.base import SCHEMES, Traits
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.common.piece import Keys, LateCosSin, LateTable, Piece, side_by_side
from hf_posswap.schemes.rope import OwnRotary, RotaryMechanism


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


@dataclass(frozen=True, kw_only=True)
class Piecewise(OwnRotary):
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
        return dataclasses.replace(resolved, original_length=self.original_length or geometry.original_length)

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

    def rotate_query(self, query: Tensor, prepared: object) -> Tensor:
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


@dataclass(frozen=True, kw_only=True)
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


@SCHEMES.register("self_extend")
@dataclass(frozen=True, kw_only=True)
class SelfExtend(Windowed):
    """Distance i - j below w; else floor(i/G) - floor(j/G) + w - floor(w/G). Reaches (L - w) G + w tokens.

    A key later than its query, which the paper does not have but a mask may show: i - j where j - i < w, else
    floor(i/G) - floor(j/G) - w + floor(w/G).

    The authors' released code (https://github.com/datamllab/LongLM) shifts by w - w/G, not rounded, in its eager
    forward, and by w - floor(w/G) in its decoding with flash attention: if G does not divide w, the two differ by
    part of a position. This scheme follows the paper. The released code can also scale queries by the logarithm of
    their position, off by default; this scheme does not. There w is 1024 and G is 8, whatever the model.

    Attributes:
        group: G >= 2, tokens that share a far position; None takes the smallest that reaches max_length.

    Example:
        >>> SelfExtend(window=1024, group=8).group
        8
    """

    name: ClassVar[str] = "self_extend"
    summary: ClassVar[str] = "Self-Extend: exact distances nearby, grouped ones far away"
    source: ClassVar[str] = "https://arxiv.org/abs/2401.01325"

    group: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group is not None:
            checks.whole(self.name, "group", self.group, minimum=2, maximum=2**31)

    @classmethod
    def stand_ins(cls, geometry: Geometry) -> dict[str, object]:
        return {"group": 3}

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        window, original = resolved.filled("window"), resolved.filled("original_length")
        if self.group is None and max_length is None:
            raise SchemeError(f"{self.name}: give group or max_length; the model's own length is {original} tokens.")
        group = self.group or max(2, math.ceil((max_length - window) / (original - window)))
        resolved = dataclasses.replace(resolved, group=group)
        if max_length is not None and resolved.reach(geometry) < max_length:
            raise SchemeError(
                f"{self.name}: window {window} and group {group} reach {resolved.reach(geometry)} tokens, but "
                f"max_length is {max_length}; give a larger group, or leave it out."
            )
        return resolved

    def reach(self, geometry: Geometry) -> int:
        window = self.filled("window")
        return (self.filled("original_length") - window) * self.filled("group") + window

    def far(self, window: int) -> Far:
        group = self.filled("group")
        shift = window - window // group
        return Far(
            behind=lambda i: groups_of(i, group) + shift,
            ahead=lambda i: groups_of(i, group) - shift,
            key=lambda j: groups_of(j, group),
        )


@dataclass(frozen=True, kw_only=True)
class Rectified(Windowed):
    """Base of both.

    Attributes:
        log_scaling: whether each query is also multiplied by max(1, ln(i + 1)/ln L), which keeps the entropy of
            attention constant as the text grows.
    """

    log_scaling: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.flag(self.name, "log_scaling", self.log_scaling)

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, relative=not self.log_scaling)

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        if self.log_scaling and resolved.filled("original_length") < 2:
            raise SchemeError(f"{self.name}: log scaling needs an original length of at least 2 tokens.")
        return resolved

    def mechanism(self, geometry: Geometry) -> RectifiedMechanism:
        return RectifiedMechanism(self, geometry)


class RectifiedMechanism(PiecewiseMechanism):
    """Splits attention, and scales queries if log scaling is on."""

    scheme: Rectified

    def __init__(self, scheme: Rectified, geometry: Geometry) -> None:
        super().__init__(scheme, geometry)
        self.scales = scheme.log_scaling

    def scale(self, query_positions: Tensor) -> Tensor:
        grown = torch.log(query_positions.clamp(min=0).float() + 1)
        return (grown / math.log(self.scheme.filled("original_length"))).clamp(min=1.0)


@SCHEMES.register("rerope")
@dataclass(frozen=True, kw_only=True)
class ReRope(Rectified):
    """ReRoPE: distance min(i - j, w); for a key later than its query, max(i - j, -w).

    Example:
        >>> ReRope(window=512, log_scaling=True).traits.relative
        False
    """

    name: ClassVar[str] = "rerope"
    summary: ClassVar[str] = "ReRoPE: distances stop growing at a window"
    source: ClassVar[str] = "https://kexue.fm/archives/9708"

    def far(self, window: int) -> Far:
        return Far(
            behind=lambda i: torch.full_like(i, window),
            ahead=lambda i: torch.full_like(i, -window),
            key=torch.zeros_like,
        )


@SCHEMES.register("leaky_rerope")
@dataclass(frozen=True, kw_only=True)
class LeakyReRope(Rectified):
    """Leaky ReRoPE: distance i - j below w, else w + (i - j - w)/k. Reaches (L - w) k + w tokens.

    For a key later than its query: i - j where j - i < w, else -w + (i - j + w)/k.

    Attributes:
        slowdown: k >= 1; None takes the smallest that reaches max_length.

    Example:
        >>> LeakyReRope(window=512, slowdown=16).slowdown
        16.0
    """

    name: ClassVar[str] = "leaky_rerope"
    summary: ClassVar[str] = "Leaky ReRoPE: distances grow slowly beyond a window"
    source: ClassVar[str] = "https://kexue.fm/archives/9708"

    slowdown: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slowdown is not None:
            checked = checks.number(self.name, "slowdown", self.slowdown, minimum=1.0, maximum=1e6)
            object.__setattr__(self, "slowdown", checked)

    @classmethod
    def stand_ins(cls, geometry: Geometry) -> dict[str, object]:
        return {"slowdown": 3.0}

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        window, original = resolved.filled("window"), resolved.filled("original_length")
        if self.slowdown is None and max_length is None:
            raise SchemeError(f"{self.name}: give slowdown or max_length; the model's own length is {original} tokens.")
        slowdown = self.slowdown or max(1.0, (max_length - window) / (original - window))
        resolved = dataclasses.replace(resolved, slowdown=slowdown)
        if max_length is not None and resolved.reach(geometry) < max_length:
            raise SchemeError(
                f"{self.name}: window {window} and slowdown {slowdown:g} reach {resolved.reach(geometry)} tokens, but "
                f"max_length is {max_length}; give a larger slowdown, or leave it out."
            )
        return resolved

    def reach(self, geometry: Geometry) -> int:
        window = self.filled("window")
        return math.floor((self.filled("original_length") - window) * self.filled("slowdown") + window + 1e-6)

    def far(self, window: int) -> Far:
        slowdown = self.filled("slowdown")

        def slowed(positions: Tensor) -> Tensor:
            return positions.to(widest(positions.device)) / slowdown

        return Far(
            behind=lambda i: slowed(i - window) + window,
            ahead=lambda i: slowed(i + window) - window,
            key=slowed,
        )


@SCHEMES.register("dual_chunk")
@dataclass(frozen=True, kw_only=True)
class DualChunk(Piecewise):
    """Dual chunk attention (DCA): a key at j has position j mod l, so its rotation is final when it is cached.

    A query at i has position i mod l for keys in the same chunk of l tokens, min(i mod l + l, s) for keys of the
    previous chunk, so that the nearest s - l keep their distance, and min(2 l - 1, s) for older ones. The paper has no
    later keys, but a mask may show them. They are treated as in the reversed text: max(i mod l - l, l - 1 - s) for
    those of the next chunk, so that the nearest s - l keep their distance, and max(-l, l - 1 - s) for later ones.

    The authors' released code also multiplies cos and sin by 0.05 ln(n/L) + 1 once it has read a text of n > L tokens,
    and for all texts after it. The paper's results do not use this factor, and neither does this scheme. It keeps the
    scaling of the model's own angles and counts positions from the end of the padding; the released code uses plain
    angles and ignores padding while it reads a prompt.

    Attributes:
        chunk: s, the largest position that a query takes, less than L; None takes 3 L/4.
        local: s - l, how many keys of the previous chunk keep their distance at least; None takes L/8.

    Example:
        >>> DualChunk(chunk=3072, local=512).local
        512
    """

    name: ClassVar[str] = "dual_chunk"
    summary: ClassVar[str] = "dual chunk attention: positions start anew in each chunk"
    source: ClassVar[str] = "https://arxiv.org/abs/2402.17463"

    chunk: int | None = None
    local: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("chunk", "local"):
            if getattr(self, field) is not None:
                checks.length(self.name, field, getattr(self, field))

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        original = resolved.filled("original_length")
        chunk = max(2, 3 * original // 4) if self.chunk is None else self.chunk
        local = max(1, original // 8) if self.local is None else self.local
        if not local < chunk < original:
            raise SchemeError(
                f"{self.name}: needs local < chunk < original length, got local={local}, chunk={chunk} and an original "
                f"length of {original} tokens."
            )
        return dataclasses.replace(resolved, chunk=chunk, local=local)

    def cached_key(self, positions: Tensor) -> Tensor:
        return positions % (self.filled("chunk") - self.filled("local"))

    def region_positions(self) -> tuple[RegionPositions, ...]:
        largest = self.filled("chunk")
        size = largest - self.filled("local")
        least = size - 1 - largest
        return (
            RegionPositions(lambda i: i % size, None, Region(size, 0, 1)),
            RegionPositions(lambda i: (i % size + size).clamp(max=largest), None, Region(size, 1, 2)),
            RegionPositions(lambda i: torch.full_like(i, min(2 * size - 1, largest)), None, Region(size, 2, None)),
            RegionPositions(lambda i: (i % size - size).clamp(min=least), None, Region(size, -1, 0)),
            RegionPositions(lambda i: torch.full_like(i, max(-size, least)), None, Region(size, None, -1)),
        )


@SCHEMES.register("string")
@dataclass(frozen=True, kw_only=True)
class String(Piecewise):
    """STRING: distance i - j below S, else i - j - S + W: the rarest, largest distances of training are not used.

    A model has seen few pairs that are almost a whole window apart, and reads less of them than its length promises.
    So this changes what a model reads *inside* its window, without training; beyond it reaches L + S - W tokens. Keys
    have their own positions, so their rotation is final when they are cached. For a key later than its query, which
    the paper does not have but a mask may show: i - j where j - i < S, else i - j + S - W.

    The released code also multiplies cos and sin by 0.1 ln 2 + 1 = 1.0693; that is `attention_factor`, 1 by default. It
    counts pairs at distance S twice, once on either side; here they are far ones.

    Attributes:
        shift: S, distances below which are exact, less than L; None takes L/3, or more where max_length needs it. The
            authors recommend L/4 to 2L/5.
        local: W, the distance of a pair that is S apart, less than S; None takes 128, or S/2 where that is less. The
            authors recommend 128 to 512.
        attention_factor: factor on cos and sin, times the model's.

    Example:
        >>> from hf_posswap.geometry import Geometry
        >>> shape = Geometry(8, 1, 1, head_dim=8, num_layers=1, original_length=8192, causal=True)
        >>> string = String().resolve(shape, None)
        >>> string.shift, string.local, string.reach(shape)
        (2730, 128, 10794)
    """

    name: ClassVar[str] = "string"
    summary: ClassVar[str] = "STRING: far distances shifted back into those that training has seen often"
    source: ClassVar[str] = "https://arxiv.org/abs/2410.18745"

    shift: int | None = None
    local: int | None = None
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("shift", "local"):
            if getattr(self, field) is not None:
                checks.length(self.name, field, getattr(self, field))
        factor = checks.number(self.name, "attention_factor", self.attention_factor, above=0.0)
        object.__setattr__(self, "attention_factor", factor)

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, relative=True)

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        original, shift = resolved.filled("original_length"), self.shift
        if shift is None:
            beyond = 0 if max_length is None else max_length - original
            needed = beyond + (min(LOCAL, beyond - 1) if self.local is None else self.local)
            shift = max(2, original // 3, min(original - 1, needed))
        local = max(1, min(LOCAL, shift // 2)) if self.local is None else self.local
        if not local < shift < original:
            raise SchemeError(
                f"{self.name}: needs local < shift < original length, or nothing would be shifted; got local={local}, "
                f"shift={shift} and an original length of {original} tokens."
            )
        resolved = dataclasses.replace(resolved, shift=shift, local=local)
        if max_length is not None and resolved.reach(geometry) < max_length:
            more = "" if self.shift is None else f"give a larger shift, less than {original}, or "
            raise SchemeError(
                f"{self.name}: shift {shift} and local {local} reach {resolved.reach(geometry)} tokens, but max_length "
                f"is {max_length}; {more}use 'self_extend', which reaches any length."
            )
        return resolved

    @property
    def exact_below(self) -> int | None:
        return self.shift

    def reach(self, geometry: Geometry) -> int:
        return self.filled("original_length") + self.filled("shift") - self.filled("local")

    def attention_scaling(self, geometry: Geometry) -> float:
        return super().attention_scaling(geometry) * self.attention_factor

    def cached_key(self, positions: Tensor) -> Tensor:
        return positions

    def region_positions(self) -> tuple[RegionPositions, ...]:
        shift = self.filled("shift")
        back = shift - self.filled("local")
        return (
            RegionPositions(itself, None, Region(1, 1 - shift, shift)),
            RegionPositions(lambda i: i - back, None, Region(1, shift, None)),
            RegionPositions(lambda i: i + back, None, Region(1, None, 1 - shift)),
        )


LOCAL = 128
"""The authors' W, in tokens."""
