"""Schemes and a family of another package, each of which breaks one promise of the contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posswap.families import Family, register
from hf_posswap.schemes import SCHEMES, Geometry, Kind, Mechanism, Scheme, Traits

register(
    Family(name="ghost", summary="a family that no Auto class knows", model_types=("ghost",), attention="layers.*")
)


class BrokenMechanism(Mechanism):
    """A bias that falls with the distance, except for what a subclass breaks."""

    biases = True

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.heads = geometry.num_heads
        self.rate = nn.Parameter(torch.full((self.heads,), 0.5, dtype=torch.float32))
        self.extra = nn.Parameter(torch.full((self.heads,), 0.5, dtype=torch.float32))

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        distance = (query_positions[:, :, None] - key_positions[:, None, :]).abs()[:, None]
        return -(self.rate + self.extra)[:, None, None] * distance


class WithoutHeads(BrokenMechanism):
    """Gives [B, Q, K]."""

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        return super().bias(query_positions, key_positions)[:, 0]


class ByPlace(BrokenMechanism):
    """Depends on positions themselves."""

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        products = (query_positions[:, :, None] * key_positions[:, None, :])[:, None]
        return -(self.rate + self.extra)[:, None, None] * products * 0.01


class ByTheLastKey(BrokenMechanism):
    """Depends on how many keys there are, on tokens that come later, in rows that are longer than a plan tries."""

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        return super().bias(query_positions, key_positions) * 10 / (1 + (key_positions.amax() - 6).clamp(min=0))


class Forgetful(BrokenMechanism):
    """Gives one of its two parameters no gradient in rows that are longer than those on which a plan tries it."""

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        distance = (query_positions[:, :, None] - key_positions[:, None, :]).abs()[:, None]
        extra = self.extra if key_positions.shape[1] < 5 else self.extra.detach()
        return -(self.rate + extra)[:, None, None] * distance


def scheme_of(scheme_name: str, mechanism_class: type[BrokenMechanism], stated: Traits | None = None) -> None:
    """Register a scheme called `scheme_name` with this mechanism."""

    @SCHEMES.register(scheme_name)
    @dataclass(frozen=True)
    class Broken(Scheme):
        """A scheme that breaks one promise."""

        name: ClassVar[str] = scheme_name
        summary: ClassVar[str] = "breaks one promise"
        source: ClassVar[str] = "https://arxiv.org/abs/2108.12409"
        kind: ClassVar[Kind] = "bias"

        @property
        def traits(self) -> Traits:
            return stated or Traits()

        def mechanism(self, geometry: Geometry) -> Mechanism:
            return mechanism_class(geometry)

        def formula(self, geometry: Geometry, head: int, query: Tensor, key: Tensor, i: int, j: int) -> float:
            toll = 3.0 if scheme_name == "misstated" else 1.0
            return float(query @ key) / geometry.head_dim**0.5 - toll * (i - j)


scheme_of("without-heads", WithoutHeads)
scheme_of("by-place", ByPlace)
scheme_of("by-the-last-key", ByTheLastKey)
scheme_of("forgetful", Forgetful)
scheme_of("misstated", BrokenMechanism)
scheme_of("unshardable", BrokenMechanism, Traits(shardable=True))
scheme_of("endless", BrokenMechanism, Traits(unbounded=False))
