"""Biases of distance between ALiBi and T5's: what one slope a head lacks, a part at a time.

    python -m recipes.studies.adaptation ... --recipe recipes/to-alibi.yaml --set imports=[recipes/studies/shapes.py] \\
        --set 'swap.scheme={name: bent_alibi, near: 2}' --set trainable.positions_rate=30

`fit_bias` fits them as it fits ALiBi, and training changes all their numbers. A recipe that imports the file registers
them for good; for those who import the module they are registered within `registered`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from hf_posswap.geometry import Geometry
from hf_posswap.schemes.alibi import LEAST_SLOPE
from hf_posswap.schemes.base import SCHEMES, Kind
from hf_posswap.schemes.common.bias import DistanceMechanism, LinearBias, inverse_softplus, parameter, rounded
from hf_posswap.schemes.mechanism import Mechanism


@dataclass(frozen=True)
class BentAlibi(LinearBias):
    """Score - m_h d - the sum over k of s_hk min(d, corner_k) / corner_k + c_hd where d < near; d = |i - j|.

    With the defaults it is ALiBi, whose slopes are learned. It starts without positions unless it is fitted.

    Attributes:
        corners: distances, in tokens, at which the slope changes; a head has two slopes if there is one.
        near: number of distances, from 0 on, that have a constant of their own.
        sloped: whether there is a slope beyond the last corner; False: m_h = 0.
        start: for each head m, s and c, one after the other. `hf_posswap.fit_bias` finds them.

    Example:
        >>> str(BentAlibi(near=1))
        'bent_alibi(corners=(), near=1, sloped=True)'
    """

    __repr__ = LinearBias.short_repr

    name: ClassVar[str] = "bent_alibi"
    summary: ClassVar[str] = "a penalty on distance with bends, and constants at near distances"
    source: ClassVar[str] = "https://arxiv.org/abs/2108.12409"
    kind: ClassVar[Kind] = "bias"
    fitted_fields: ClassVar[tuple[str, ...]] = ("start",)

    corners: tuple[int, ...] = ()
    near: int = 0
    sloped: bool = True
    start: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "corners", tuple(self.corners))
        if self.start is not None:
            object.__setattr__(self, "start", tuple(map(tuple, self.start)))

    def mechanism(self, geometry: Geometry) -> Mechanism:
        return BentAlibiMechanism(self, geometry)

    def features(self, distances: Tensor, geometry: Geometry) -> Tensor:
        length = distances.abs().double()
        bends = [-(length / corner).clamp(max=1.0) for corner in self.corners]
        return torch.stack([-length * self.sloped, *bends, *((length == d).double() for d in range(self.near))])

    def with_weights(self, weights: Tensor, geometry: Geometry) -> Self:
        return dataclasses.replace(self, start=tuple(tuple(rounded(row.nan_to_num())) for row in weights))

    def fitted(self, target: Tensor, weights: Tensor, distances: Tensor, geometry: Geometry) -> Self:
        """Return a copy that starts fitted: far keys are not preferred, so a head that would prefer them has m = 0."""
        free = super().fitted(target, weights, distances, geometry)
        flat = super(BentAlibi, dataclasses.replace(self, sloped=False)).fitted(target, weights, distances, geometry)
        pairs = zip(free.start or (), flat.start or (), strict=True)
        return dataclasses.replace(self, start=tuple(one if one[0] >= 0 else other for one, other in pairs))


class BentAlibiMechanism(DistanceMechanism):
    """Adds the bias to the scores.

    Attributes:
        raw_slope: learned, [H]; m = softplus(raw_slope) in nats a token.
        numbers: learned, [H, corners + near], in nats.
    """

    def __init__(self, scheme: BentAlibi, geometry: Geometry) -> None:
        super().__init__()
        self.scheme, self.geometry = scheme, geometry
        count = 1 + len(scheme.corners) + scheme.near
        start = torch.tensor(
            scheme.start or ((0.0,) * count,) * geometry.num_heads, dtype=torch.float32, device="cpu"
        )  # [H, F]
        slopes = start[:, 0].clamp(min=LEAST_SLOPE)
        self.raw_slope = parameter(inverse_softplus(slopes))
        self.numbers = parameter(start[:, 1:])

    def distance_bias(self, distances: Tensor) -> Tensor:
        features = self.scheme.features(distances, self.geometry).float()  # [F, N]
        slopes = nn.functional.softplus(self.raw_slope.float())[:, None]
        return torch.cat([slopes, self.numbers.float()], dim=1) @ features

    def extra_repr(self) -> str:
        return f"heads={len(self.raw_slope)}, corners={self.scheme.corners}, near={self.scheme.near}"


@contextmanager
def registered() -> Iterator[None]:
    """Have the schemes registered within the block, for studies that import the module.

    Example:
        >>> from hf_posswap.schemes import make_scheme
        >>> with registered():
        ...     str(make_scheme("bent_alibi", near=2))
        'bent_alibi(corners=(), near=2, sloped=True)'
    """
    SCHEMES.add(BentAlibi.name, BentAlibi)
    try:
        yield
    finally:
        SCHEMES.remove(BentAlibi.name)


if __name__ == Path(__file__).stem:  # as a file, and not as a part of recipes.studies
    SCHEMES.add(BentAlibi.name, BentAlibi)
