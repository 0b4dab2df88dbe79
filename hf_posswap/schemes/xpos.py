"""xPos: rotation with a decay, so that far keys count less, in fast pairs first.

Sun et al. 2022, https://arxiv.org/abs/2212.10554, section 2.2 and algorithm 1.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from hf_posswap.compat.torch_tensors import holds_values
from hf_posswap.errors import PositionRangeError, SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.rope_math import CosSin, default_inv_freq, rotate, widest
from hf_posswap.schemes.base import SCHEMES, Traits
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.rope import RotaryMechanism, RotaryScheme

HEADROOM = 64.0
"""Largest magnitude of entries of q and k that, once scaled, still fit into their dtype."""


@SCHEMES.register("xpos")
@dataclass(frozen=True, kw_only=True)
class XPos(RotaryScheme):
    """xPos: RoPE with q times zeta_i^((n - c)/scale_base), k times zeta_i^(-(n - c)/scale_base).

    zeta_i = (2i/R + gamma) / (1 + gamma). The centre c cancels in every score, which decays with the distance alone; it
    is fixed, so that cached keys stay valid. But each factor grows or shrinks with |n - c|: with the paper's
    parameters, float32 and bfloat16 hold some 33 900 positions to both sides of c, float16 some 2 200; float64 no more
    than float32, in which the factors are computed. Beyond,
    PositionRangeError is raised. On devices other than the CPU, where the check would synchronize with the host, only
    the planned length is checked.

    Attributes:
        gamma: > 0; the larger, the slower the decay.
        scale_base: B, in tokens.
        centre: c, a position; None takes half of the longer of max_length and the model's own length.

    Example:
        >>> XPos(scale_base=1024).gamma
        0.4
    """

    name: ClassVar[str] = "xpos"
    summary: ClassVar[str] = "xPos: rotation, and a decay with distance"
    source: ClassVar[str] = "https://arxiv.org/abs/2212.10554"
    only_rotates: ClassVar[bool] = False

    gamma: float = 0.4
    scale_base: float = 512.0
    centre: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("gamma", "scale_base"):
            object.__setattr__(self, field, checks.number(self.name, field, getattr(self, field), above=0.0))
        if self.centre is not None:
            checks.length(self.name, "centre", self.centre)

    @property
    def traits(self) -> Traits:
        return Traits(causal_only=True, unbounded=False, shardable=True)

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        length = max(max_length or 0, geometry.original_length)
        centre = self.centre or max(1, length // 2)
        farthest, limit = max(centre, length - 1 - centre), resolved.largest_position(geometry, torch.float32)
        if farthest > limit:
            raise SchemeError(
                f"{self.name}: float32 holds its factors up to {limit} positions from the centre, but {length} tokens "
                f"around centre={centre} reach {farthest}; choose a larger scale_base, or a shorter max_length."
            )
        return dataclasses.replace(resolved, centre=centre)

    def zeta(self, geometry: Geometry) -> Tensor:
        """Return zeta_i of a resolved scheme, shape [R/2], in (0, 1), float64."""
        dim = self.rotary_dim(geometry)
        index = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu")  # [R/2]
        return (index / dim + self.gamma) / (1 + self.gamma)

    def largest_position(self, geometry: Geometry, dtype: torch.dtype) -> int:
        """Return how far from the centre a position may lie before its factors leave the range of `dtype`.

        The factors are computed in float32, so float64 holds no more than that.
        """
        steepest = -math.log(self.gamma / (1 + self.gamma))  # of zeta_0
        limits = torch.finfo(torch.float32 if dtype == torch.float64 else dtype)  # the factors are float32
        room = min(math.log(limits.max), -math.log(limits.smallest_normal)) - math.log(HEADROOM)
        return math.floor(room / steepest * self.scale_base)

    def theta(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        return default_inv_freq(self.filled("base"), self.rotary_dim(geometry), dtype)

    def mechanism(self, geometry: Geometry) -> XPosMechanism:
        return XPosMechanism(self, geometry)


class XPosTables(NamedTuple):
    """cos and sin [B or 1, 1, Q, R/2] with the factors of queries and of keys, and the largest |n - c| in them."""

    query: CosSin
    key: CosSin
    farthest: int


class XPosMechanism(RotaryMechanism):
    """Rotates q and k, and scales them against each other."""

    scheme: XPos

    def __init__(self, scheme: XPos, geometry: Geometry) -> None:
        super().__init__(scheme, geometry)
        self.octaves = scheme.zeta(geometry).log2() / scheme.scale_base  # [R/2], log2 of the factor a position
        self.centre: int = scheme.filled("centre")

    def prepare(self, positions: Tensor, length: Tensor) -> XPosTables:  # type: ignore[override]
        cos, sin = super().prepare(positions, length)
        if self.octaves.device != positions.device:
            self.octaves = self.octaves.to(positions.device, widest(positions.device))
        offset = positions - self.centre  # [B or 1, Q]
        octaves = offset[:, None, :, None].to(self.octaves.dtype) * self.octaves  # [B or 1, 1, Q, R/2]
        whole = octaves.round()  # separately, because float32 would round a large exponent too coarsely
        factor = whole.float().exp2() * (octaves - whole).float().exp2()
        farthest = self.centre
        if positions.device.type == "cpu" and holds_values(positions) and not torch.compiler.is_compiling():
            farthest = int(offset.abs().max())
        return XPosTables(CosSin(cos * factor, sin * factor), CosSin(cos / factor, sin / factor), farthest)

    def rotate_query(self, query: Tensor, prepared: XPosTables) -> Tensor:  # type: ignore[override]
        self._within(prepared.farthest, query.dtype)
        return rotate(query, prepared.query, self.layout)

    def rotate_key(self, key: Tensor, prepared: XPosTables) -> Tensor:  # type: ignore[override]
        self._within(prepared.farthest, key.dtype)
        return rotate(key, prepared.key, self.layout)

    def _within(self, farthest: int, dtype: torch.dtype) -> None:
        limit = self.scheme.largest_position(self.geometry, dtype)
        if farthest > limit:
            raise PositionRangeError(
                f"xpos: a position lies {farthest} tokens from centre={self.centre}, and in {dtype} its factors hold "
                f"for {limit}. Use a wider dtype, or swap again with a larger scale_base or a closer centre."
            )
