"""ALiBi: a penalty on the attention score that grows with distance, one slope a head; of tokens, and of patches.

Press et al. 2021, https://arxiv.org/abs/2108.12409, section 3. Interpolated: Al-Khateeb et al. 2023,
https://arxiv.org/abs/2310.13017. Of patches: Fuller et al. 2023 (CROMA), https://arxiv.org/abs/2311.00566, section 3.3:
the Euclidean distance, in patches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes.base import SCHEMES, Input, Kind, Scheme
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.common.bias import DistanceMechanism, LinearBias, inverse_softplus, parameter, rounded
from hf_posswap.schemes.common.table import row_and_column
from hf_posswap.schemes.mechanism import Mechanism

LEAST_SLOPE = 1e-5
"""Lower bound, in nats a token, of a learned slope at the start: near 0 the gradient of its softplus vanishes."""


def slopes(heads: int) -> list[float]:
    """Return m_h for each head.

    They are 2^(-8h/n), h = 1..n, where n is a power of two; else, as the authors' code does, those of the next lower
    power and then every other one of the next higher.

    Example:
        >>> slopes(4)
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 2 ** int(math.log2(heads))
    coarse = [2.0 ** (-8.0 * h / power) for h in range(1, power + 1)]
    if power == heads:
        return coarse
    finer = [2.0 ** (-4.0 * h / power) for h in range(1, 2 * power + 1)]
    return coarse + finer[0::2][: heads - power]


@SCHEMES.register("alibi")
@dataclass(frozen=True)
class Alibi(LinearBias):
    """ALiBi: score - (m_h / s) |i - j|. s = 1 is ALiBi; a larger s is its extension by Al-Khateeb et al.

    In an encoder the penalty is the same to both sides.

    Attributes:
        interpolation: s >= 1, the target length over the length that the model was trained on with ALiBi: all
            distances then cost what they cost there. Not in ALiBi's paper: Al-Khateeb et al. 2023,
            https://arxiv.org/abs/2310.13017, who recompute s for each longer input. Here it is one number, so that a
            cached and a full forward agree. None means s = 1.
        slopes: m_h of each head, >= 0; None: the paper's. `hf_posswap.fit_bias` finds those closest to a model's
            own positions, for each layer.
        learned: whether training moves the slopes: m_h = softplus(raw_h), from those above on, or 1e-5 where they are
            less. Layers share them, unless each layer has its own `slopes`, as after a fit.

    Example:
        >>> Alibi().traits.relative
        True
        >>> str(Alibi(interpolation=4)), str(Alibi(learned=True))
        ('alibi(interpolation=4.0)', 'alibi(learned=True)')
    """

    __repr__ = Scheme.short_repr

    name: ClassVar[str] = "alibi"
    summary: ClassVar[str] = "a linear penalty on distance, one slope a head"
    source: ClassVar[str] = "https://arxiv.org/abs/2108.12409"
    kind: ClassVar[Kind] = "bias"
    fitted_fields: ClassVar[tuple[str, ...]] = ("slopes",)

    interpolation: float | None = None
    slopes: tuple[float, ...] | None = None
    learned: bool = False

    def __post_init__(self) -> None:
        if self.interpolation is not None:
            checked = checks.number(self.name, "interpolation", self.interpolation, minimum=1.0, maximum=1e6)
            object.__setattr__(self, "interpolation", checked)
        if self.slopes is not None:
            given = checks.factors(self.name, "slopes", self.slopes, zero=True, each="head")
            object.__setattr__(self, "slopes", given)
        checks.flag(self.name, "learned", self.learned)

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        super().resolve(geometry, max_length)
        heads = geometry.num_heads
        if self.slopes is not None and len(self.slopes) != heads:
            raise SchemeError(
                f"{self.name}: slopes has {len(self.slopes)} numbers, and this model has {heads} heads; give one each."
            )
        stock = self.slopes == tuple(slopes(heads))
        return dataclasses.replace(self, slopes=None) if stock else self

    def mechanism(self, geometry: Geometry) -> Mechanism:
        per_head = slopes(geometry.num_heads) if self.slopes is None else self.slopes
        return AlibiMechanism(per_head, self.interpolation or 1.0, learned=self.learned)

    def features(self, distances: Tensor, geometry: Geometry) -> Tensor:
        return -distances.abs()[None].double() / (self.interpolation or 1.0)

    def with_weights(self, weights: Tensor, geometry: Geometry) -> Self:
        return dataclasses.replace(self, slopes=tuple(rounded(weights[:, 0].clamp(min=0))))

    def reach(self, geometry: Geometry) -> int | None:
        return None if self.interpolation is None else math.floor(self.interpolation * geometry.original_length)

    def __str__(self) -> str:
        """Return the usual form, which names `learned` only where it is True."""
        return super().__str__().replace(", learned=False", "").replace("(learned=False)", "")


class AlibiMechanism(DistanceMechanism):
    """Adds -(m_h / s) |i - j| to the scores.

    Attributes:
        constant_slopes: m / s, [H], where they are not learned.
        raw_slopes: learned, [H]; m = softplus(raw_slopes).
    """

    def __init__(self, per_head: Sequence[float], interpolation: float, *, learned: bool = False) -> None:
        super().__init__()
        self.interpolation, self.learns_slopes = interpolation, learned
        if learned:
            start = torch.tensor(per_head, dtype=torch.float32, device="cpu").clamp(min=LEAST_SLOPE)
            self.raw_slopes = parameter(inverse_softplus(start))
        else:
            divided = [slope / interpolation for slope in per_head]
            self.constant_slopes = torch.tensor(divided, dtype=torch.float32, device="cpu")

    @property
    def slopes(self) -> Tensor:  # type: ignore[override]
        """Those that the scores get, m / s, [H], float32; where they are learned, by what raw_slopes is now."""
        if not self.learns_slopes:
            return self.constant_slopes
        return nn.functional.softplus(self.raw_slopes.float()) / self.interpolation

    def distance_bias(self, distances: Tensor) -> Tensor:
        if not self.learns_slopes and self.constant_slopes.device != distances.device:
            self.constant_slopes = self.constant_slopes.to(distances.device)
        return -self.slopes[:, None] * distances.abs()

    def extra_repr(self) -> str:
        return f"heads={len(self.slopes)}{', learned' if self.learns_slopes else ''}"


@SCHEMES.register("alibi_2d")
@dataclass(frozen=True)
class Alibi2D(Scheme):
    """Score - m_h sqrt((r - r')^2 + (c - c')^2), m_h the slopes of ALiBi.

    Tokens without a patch (class, distillation) attend and are attended to without a penalty.

    Example:
        >>> Alibi2D().traits.relative
        True
    """

    name: ClassVar[str] = "alibi_2d"
    summary: ClassVar[str] = "a linear penalty on the distance of patches, one slope a head"
    source: ClassVar[str] = "https://arxiv.org/abs/2311.00566"
    kind: ClassVar[Kind] = "bias"
    inputs: ClassVar[tuple[Input, ...]] = ("images",)

    def mechanism(self, geometry: Geometry) -> Mechanism:
        return Alibi2DMechanism(geometry.num_heads)


class Alibi2DMechanism(Mechanism):
    """Adds -m_h times the distance to the scores."""

    biases = True

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.steepness = torch.tensor(slopes(heads), dtype=torch.float32, device="cpu")  # [H]

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        if self.steepness.device != query_positions.device:
            self.steepness = self.steepness.to(query_positions.device)
        rows, columns, placed = row_and_column(query_positions[:, :, None])  # [B, Q, 1]
        key_rows, key_columns, key_placed = row_and_column(key_positions[:, None, :])  # [B, 1, K]
        distance = torch.hypot((rows - key_rows).float(), (columns - key_columns).float())  # [B, Q, K]
        distance = distance.masked_fill(~(placed & key_placed), 0.0)
        return -self.steepness[:, None, None] * distance[:, None]

    def extra_repr(self) -> str:
        return f"heads={len(self.steepness)}"
