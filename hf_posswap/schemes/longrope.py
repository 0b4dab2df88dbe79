"""LongRoPE with given factors: one divisor a rotary pair, short ones within the original length, long ones beyond.

Ding et al. 2024, https://arxiv.org/abs/2402.13753, equation 5; transformers and Phi-3 have it with n-hat = 0 only.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.rope_math import CosSin, Frequencies, cos_sin
from hf_posswap.schemes.base import SCHEMES, Scheme, Traits
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.common.dynamic_rope import DynamicRope

MOST_POSITIONS = 2**31
"""The largest n-hat: the most positions that a swap supports."""


@SCHEMES.register("longrope")
@dataclass(frozen=True)
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
    def stand_ins(cls, geometry: Geometry) -> dict[str, Any]:
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

    def native_rope(self, geometry: Geometry) -> dict[str, Any] | None:
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
