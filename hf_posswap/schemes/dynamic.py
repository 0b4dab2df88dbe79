"""NTK-aware scaling and LongRoPE: angles that may follow the length, of the text, of each query's past, or one pinned.

Stock transformers takes the angles of the current length for all tokens. Keys and values of deeper layers were then
computed under other angles than a full forward would use, so decoding with a cache and one full forward differ past
the original length. There are two fixes: every query takes the angles of its length so far, which depends only on
its position; or one length is fixed for the whole sequence.

NTK, a larger base instead of smaller positions: Peng et al. 2023, https://arxiv.org/abs/2309.00071, definition 1 and
appendix A. LongRoPE, one given divisor a rotary pair, short ones within the original length, long ones beyond: Ding et
al. 2024, https://arxiv.org/abs/2402.13753, equation 5; transformers and Phi-3 have it with n-hat = 0 only.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.kernels.merge import OfQueries
from hf_posswap.rope_math import CosSin, Frequencies, cos_sin, default_inv_freq
from hf_posswap.schemes.base import SCHEMES, Scheme, Traits
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.common.piece import Keys, Piece, side_by_side
from hf_posswap.schemes.rope import RotaryMechanism
from hf_posswap.schemes.scaled import ScaledRotary


@dataclass(frozen=True, kw_only=True)
class DynamicRope(ScaledRotary):
    """The base of rotary schemes whose angles follow the length (transformers' dynamic rope types).

    Attributes:
        follow: "sequence": all tokens take the angles of the current length, as stock transformers does; "query": each
            query, and every key for it, takes those of the query's own length, so that full, chunked and stepwise
            forwards agree. Keys are then cached raw, or, if there are few distinct lengths, rotated for each of them.
        pin: one length, in tokens, whose angles hold for every sequence, however long.
    """

    lengths: ClassVar[int | None] = None
    """How many distinct lengths follow="query" uses; None: unboundedly many."""

    follow: Literal["sequence", "query"] = "sequence"
    pin: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice(self.name, "follow", self.follow, ("sequence", "query"))
        if self.pin is not None:
            checks.length(self.name, "pin", self.pin)
            if self.follow == "query":
                raise SchemeError(
                    f"{self.name}: follow='query' chooses angles for each token, pin={self.pin} one for all; "
                    "give one of the two."
                )

    @property
    def length_dependent(self) -> bool:
        return self.pin is None

    @property
    def traits(self) -> Traits:
        by_query = self.follow == "query"
        consistent = by_query or self.pin is not None
        return dataclasses.replace(
            super().traits,
            prefix_consistent=consistent,
            causal_only=by_query,
            relative=not by_query,
            shardable=self.pin is not None,
        )

    def notes(self) -> tuple[str, ...]:
        if self.pin is not None:
            return (f"the angles are those of {self.pin} tokens for every sequence, however long",)
        if self.follow == "query":
            kept = "raw" if self.lengths is None else f"rotated for each of {self.lengths} lengths"
            return (f"each token takes the angles of its length {self.rounding()}; keys are cached {kept}",)
        return (
            "the angles follow the current length: past the original one, decoding with a cache and a full forward "
            "differ; follow='query' or pin= make them agree",
        )

    def rounding(self) -> str:
        """Describe how follow="query" rounds lengths."""
        raise NotImplementedError

    def theta(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        if self.pin is not None:
            length = torch.tensor([self.pin], device="cpu" if length is None else length.device)
        return self.theta_at(geometry, length, dtype)

    def theta_at(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return `theta` of the given lengths, ignoring `pin`."""
        raise NotImplementedError

    def bucket(self, positions: Tensor) -> Tensor:
        """Return the index, from 0, of the distinct length of a query at `positions`."""
        raise NotImplementedError

    def first_of(self, bucket: int) -> int | None:
        """Return the first position of the queries of `bucket`, at least 1; None: there is no such bucket."""
        raise NotImplementedError

    def bucket_length(self, bucket: int) -> int:
        """Return the length, in tokens, whose angles the queries of `bucket` take."""
        raise NotImplementedError

    def mechanism(self, geometry: Geometry) -> RotaryMechanism:
        return ByQueryMechanism(self, geometry) if self.follow == "query" else RotaryMechanism(self, geometry)


class ByQueryMechanism(RotaryMechanism):
    """Splits attention by the lengths of its queries."""

    splits = True
    splits_queries = True
    rotates = False
    scheme: DynamicRope

    def __init__(self, scheme: DynamicRope, geometry: Geometry) -> None:
        super().__init__(scheme, geometry)
        self.keys_per_token = scheme.lengths or 1
        self.stores_rotated_keys = self.keys_per_token > 1

    def prepare(self, positions: Tensor, length: Tensor) -> Any:
        return tuple(self._turn(bucket, positions) for bucket in range(self.keys_per_token))

    def rotate_query(self, query: Tensor, prepared: object) -> Tensor:
        return query  # each piece rotates it itself

    def rotate_key(self, key: Tensor, prepared: Any) -> Tensor:
        return side_by_side(key, prepared, self.layout)

    def pieces(self, query_positions: Tensor, key_positions: Tensor, *, keys: Keys = "raw") -> tuple[Piece, ...]:
        copied = keys == "copies"
        buckets = self.scheme.bucket(query_positions)
        return tuple(
            Piece(
                query=self._turn(bucket, query_positions),
                key=None if copied else self._turn(bucket, key_positions),
                layout=self.layout,
                pairs=OfQueries(self.scheme.first_of(bucket) if bucket else None, self.scheme.first_of(bucket + 1)),
                copy=bucket if copied else 0,
                keys_per_token=self.keys_per_token if copied else 1,
            )
            for bucket in buckets.unique().tolist()
        )

    def _turn(self, bucket: int, positions: Tensor) -> CosSin:
        length = torch.tensor([self.scheme.bucket_length(bucket)], device=positions.device)
        return self.scheme.turns(positions, self.scheme.angles(self.geometry, length), self.geometry)


@dataclass(frozen=True, kw_only=True)
class StretchedBase(ScaledRotary):
    """Base of both: b' = b g^(R/(R-2)), which slows the slowest pair by g and leaves the fastest alone."""

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        dim = resolved.rotary_dim(geometry)
        if dim < 4:
            raise SchemeError(
                f"{self.name}: needs a rotary width of at least 4, here it is {dim}; use 'linear' or 'yarn' instead."
            )
        largest = resolved.stretched(resolved.growth(resolved.reach(geometry)), dim)
        if largest > checks.LARGEST:
            raise SchemeError(
                f"{self.name}: factor {resolved.factor:g} takes base {resolved.base:g} to {largest:g} over {dim} "
                f"dimensions, more than float32 holds ({checks.LARGEST:g}); give a smaller factor or base."
            )
        return resolved

    def growth(self, length: object) -> Any:
        """Return g, a number or a tensor as `length` is, for sequences of `length` tokens."""
        raise NotImplementedError

    def stretched(self, growth: float | Tensor, dim: int) -> Any:
        """Return b', a number or a tensor as `growth` is."""
        return self.filled("base") * growth ** (dim / (dim - 2))


@SCHEMES.register("ntk")
@dataclass(frozen=True, kw_only=True)
class NTK(StretchedBase):
    """NTK-aware scaling: b' = b s^(R/(R-2)). Peng et al. 2023, https://arxiv.org/abs/2309.00071, definition 1.

    The window that really works is shorter than s L.

    Example:
        >>> NTK(factor=2).factor
        2.0
    """

    name: ClassVar[str] = "ntk"
    summary: ClassVar[str] = "NTK-aware: a larger base, chosen from the factor"
    source: ClassVar[str] = "https://arxiv.org/abs/2309.00071"

    def growth(self, length: object) -> Any:
        return self.filled("factor")

    def theta(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        dim = self.rotary_dim(geometry)
        return default_inv_freq(self.stretched(self.growth(None), dim), dim, dtype)

    def native_rope(self, geometry: Geometry) -> dict[str, object]:
        base = self.stretched(self.growth(None), self.rotary_dim(geometry))
        return {"rope_type": "default", "rope_theta": base}


@SCHEMES.register("dynamic")
@dataclass(frozen=True, kw_only=True)
class Dynamic(DynamicRope, StretchedBase):
    """Dynamic NTK: b' = b (s l/L - (s - 1))^(R/(R-2)) with l = max(current length, L).

    Within the original length it is plain RoPE. Beyond, the angles follow the current length, so as in stock
    transformers ("sequence") a token's representation depends on how much follows it.

    As a stock config (the native route) it is also stateful: transformers keeps the angles of the longest text that the
    model object has read for all later ones of L tokens or more, and resets them at a text shorter than L. The output
    for such a text then depends on what was read before it. Inside attention (site="attention", or a model without
    native rotation) each text has its own angles.
    Source: https://arxiv.org/abs/2309.00071, section 3.3 and appendix A; transformers' rope type "dynamic", which takes
    L from `max_position_embeddings`.

    Attributes:
        step: with follow="query", lengths beyond L are rounded up to L + a multiple of this, in tokens; each step
            within a text costs a rotation of all keys. None takes a quarter of L.

    Example:
        >>> Dynamic(factor=2, original_length=100).growth(150)
        2.0
        >>> Dynamic(factor=2, follow="query").traits.prefix_consistent
        True
    """

    name: ClassVar[str] = "dynamic"
    summary: ClassVar[str] = "dynamic NTK: the base grows with the length, of the text or of each token's past"
    source: ClassVar[str] = "https://arxiv.org/abs/2309.00071"

    step: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step is not None:
            checks.length(self.name, "step", self.step)
            if self.follow != "query":
                raise SchemeError(f"{self.name}: step={self.step} goes with follow='query', got {self.follow!r}.")

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        if self.follow != "query" or self.step is not None:
            return resolved
        return dataclasses.replace(resolved, step=max(1, resolved.filled("original_length") // 4))

    def rounding(self) -> str:
        return f"past {self.original_length}, rounded up by steps of {self.step}"

    def bucket(self, positions: Tensor) -> Tensor:
        beyond = positions + 1 - self.filled("original_length")  # tokens past L
        return (beyond.clamp(min=0) + self.filled("step") - 1) // self.filled("step")

    def first_of(self, bucket: int) -> int | None:
        return self.filled("original_length") + (bucket - 1) * self.filled("step")

    def bucket_length(self, bucket: int) -> int:
        return self.filled("original_length") + bucket * self.filled("step")

    def growth(self, length: object) -> Any:
        original = self.filled("original_length")
        # equal to s l/L - (s - 1), without the cancellation that would lose float32 precision
        return 1 + self.filled("factor") * (length - original) / original

    def theta_at(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        if length is None:
            return self.plain(geometry, dtype)
        dim = self.rotary_dim(geometry)
        # to(dtype) because whole numbers would be divided in the default dtype, which may be bfloat16
        growth = self.growth(length.clamp(min=self.filled("original_length")).to(dtype))  # [..., 1]
        exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=length.device).to(dtype) / dim  # [R/2]
        return 1.0 / self.stretched(growth, dim) ** exponents  # [..., R/2]

    def native_rope(self, geometry: Geometry) -> dict[str, object] | None:
        if self.follow == "query":
            return None
        if self.pin is not None:
            growth = self.growth(max(self.pin, self.filled("original_length")))
            return {"rope_type": "default", "rope_theta": self.stretched(growth, self.rotary_dim(geometry))}
        if self.filled("original_length") != geometry.original_length:
            return None  # transformers always takes L from max_position_embeddings
        return {"rope_type": "dynamic", "rope_theta": self.filled("base"), "factor": self.filled("factor")}


MOST_POSITIONS = 2**31
"""The largest n-hat: the most positions that a swap supports."""


@SCHEMES.register("longrope")
@dataclass(frozen=True, kw_only=True)
class LongRope(DynamicRope):
    """LongRoPE: theta'_i = theta_i / factor_i; cos and sin times sqrt(1 + ln s / ln L).

    As in stock transformers ("sequence"), the long factors apply to the whole text as soon as it is longer than L, so
    it is not prefix-consistent; follow="query" applies the long factors only to the queries past L. With n-hat =
    original_positions > 0, position p turns pair i by p theta_i where p < n-hat, by p theta'_i from there on; then
    absolute positions matter near the start, and no stock config can express it.

    Attributes:
        short_factor: divisors up to the original length, R/2 numbers; None: all 1.
        long_factor: divisors beyond it, R/2 numbers. Required.
        attention_factor: factor on cos and sin; None computes it from s and L.
        original_positions: n-hat, the positions at the start that keep RoPE's own angles, in tokens.

    Example:
        >>> LongRope(long_factor=[1.0, 4.0], factor=4).long_factor
        (1.0, 4.0)
    """

    __repr__ = Scheme.short_repr

    name: ClassVar[str] = "longrope"
    summary: ClassVar[str] = "LongRoPE: a given divisor for each pair, short and long"
    source: ClassVar[str] = "https://arxiv.org/abs/2402.13753"

    lengths: ClassVar[int | None] = 2

    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    attention_factor: float | None = None
    original_positions: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("short_factor", "long_factor"):
            value = getattr(self, field)
            if value is not None:
                object.__setattr__(self, field, checks.factors(self.name, field, value))
        if self.attention_factor is not None:
            checked = checks.number(self.name, "attention_factor", self.attention_factor, above=0.0)
            object.__setattr__(self, "attention_factor", checked)
        checks.whole(self.name, "original_positions", self.original_positions, minimum=0, maximum=MOST_POSITIONS)

    @classmethod
    def stand_ins(cls, geometry: Geometry) -> dict[str, object]:
        pairs = (geometry.rotary_dim or geometry.head_dim) // 2
        return super().stand_ins(geometry) | {"long_factor": [1.0 + 0.5 * pair for pair in range(pairs)]}

    @property
    def traits(self) -> Traits:
        relative = super().traits.relative and self.original_positions == 0
        return dataclasses.replace(super().traits, relative=relative)

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        pairs = resolved.rotary_dim(geometry) // 2
        if resolved.long_factor is None:
            raise SchemeError(f"{self.name}: long_factor is required: {pairs} divisors, one for each rotary pair.")
        short = resolved.short_factor or (1.0,) * pairs
        for field, value in (("short_factor", short), ("long_factor", resolved.long_factor)):
            if len(value) != pairs:
                raise SchemeError(
                    f"{self.name}: {field} needs one divisor for each of this model's {pairs} rotary pairs, "
                    f"got {len(value)}."
                )
        attention = resolved.attention_factor
        if attention is None:
            attention = self._attention(resolved.filled("factor"), resolved.filled("original_length"))
        return dataclasses.replace(resolved, short_factor=short, attention_factor=attention)

    def _attention(self, factor: float, original: int) -> float:
        if factor == 1.0:
            return 1.0
        if original == 1:
            raise SchemeError(
                f"{self.name}: an original length of 1 token gives no attention factor (ln 1 = 0); "
                "give attention_factor or a longer original_length."
            )
        return math.sqrt(1 + math.log(factor) / math.log(original))

    def rounding(self) -> str:
        return f"up to {self.original_length} or past it"

    def bucket(self, positions: Tensor) -> Tensor:
        return (positions >= self.filled("original_length")).long()

    def first_of(self, bucket: int) -> int | None:
        return self.filled("original_length") if bucket == 1 else None

    def bucket_length(self, bucket: int) -> int:
        return self.filled("original_length") + bucket

    def theta_at(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        device = "cpu" if length is None else length.device
        short = torch.tensor(self.filled("short_factor"), dtype=dtype, device=device)  # [R/2]
        divisors = short
        if length is not None:
            long = torch.tensor(self.filled("long_factor"), dtype=dtype, device=device)  # [R/2]
            divisors = torch.where(length > self.filled("original_length"), long, short)  # [..., R/2]
        return self.plain(geometry, dtype).to(device) / divisors

    def attention_scaling(self, geometry: Geometry) -> float:
        return self.filled("attention_factor")

    def turns(self, positions: Tensor, angles: Frequencies, geometry: Geometry) -> CosSin:
        divided = super().turns(positions, angles, geometry)
        if not self.original_positions:
            return divided
        plain = self.plain(geometry, torch.float64)  # [R/2]
        kept = cos_sin(positions, Frequencies.of(plain, None, self.filled("attention_factor")).to(positions.device))
        early = (positions < self.original_positions)[:, None, :, None]  # [B or 1, 1, Q, 1]
        return CosSin(torch.where(early, kept.cos, divided.cos), torch.where(early, kept.sin, divided.sin))

    def native_rope(self, geometry: Geometry) -> dict[str, object] | None:
        if self.original_positions or self.follow == "query":
            return None
        if self.pin is not None:
            return self.native_list(geometry)
        return {
            "rope_type": "longrope",
            "rope_theta": self.filled("base"),
            "factor": self.filled("factor"),
            "original_max_position_embeddings": self.filled("original_length"),
            "short_factor": list(self.filled("short_factor")),
            "long_factor": list(self.filled("long_factor")),
            "attention_factor": self.filled("attention_factor"),
        }
