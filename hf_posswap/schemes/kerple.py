"""KERPLE: a penalty on the attention score that grows with the logarithm, or a power, of distance, learned per head.

Chi et al. 2022, https://arxiv.org/abs/2205.09921, equations 6 and 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from hf_posswap.geometry import Geometry
from hf_posswap.schemes.base import SCHEMES, Kind, Scheme
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.common.bias import DistanceMechanism, generator, parameter, uniform
from hf_posswap.schemes.mechanism import Mechanism

SMALLEST = 0.01
"""Lower bound of the initial r1 and r2, as the authors' code clamps them."""
HIGHEST_POWER = 2.0
"""r2 of the power variant stays below it: up to there the kernel is conditionally positive definite."""


@SCHEMES.register("kerple")
@dataclass(frozen=True)
class Kerple(Scheme):
    """KERPLE: score - r1 ln(1 + r2 |i - j|), or score - r1 |i - j|^r2; r1, r2 > 0 learned for each head.

    They are initialized at random, as in the authors' code: "log" with r1 in (0, 2), r2 in (0, 1); "power" with r1 in
    (0, 1), r2 in (0, 2). The authors clamp them after each step; here r = softplus(raw), and 2 sigmoid(raw) for the
    power, so that they cannot leave their ranges. In an encoder the penalty is the same to both sides.

    Attributes:
        variant: "log" (the paper's best) or "power".
        seed: of the initial r1 and r2.

    Example:
        >>> Kerple().variant
        'log'
    """

    name: ClassVar[str] = "kerple"
    summary: ClassVar[str] = "a learned penalty on the logarithm, or a power, of distance"
    source: ClassVar[str] = "https://arxiv.org/abs/2205.09921"
    kind: ClassVar[Kind] = "bias"

    variant: Literal["log", "power"] = "log"
    seed: int = 0

    def __post_init__(self) -> None:
        checks.choice(self.name, "variant", self.variant, ("log", "power"))
        checks.whole(self.name, "seed", self.seed, minimum=0, maximum=checks.LARGEST_SEED)

    def mechanism(self, geometry: Geometry) -> Mechanism:
        return KerpleMechanism(self, geometry.num_heads)


class KerpleMechanism(DistanceMechanism):
    """Subtracts the penalty from the scores.

    Attributes:
        raw_r1: learned, [H]; r1 = softplus(raw_r1).
        raw_r2: learned, [H]; r2 = softplus(raw_r2), or 2 sigmoid(raw_r2) where it is a power.
    """

    def __init__(self, scheme: Kerple, heads: int) -> None:
        super().__init__()
        self.variant = scheme.variant
        source = generator(scheme.seed)
        first, second = (2.0, 1.0) if scheme.variant == "log" else (1.0, HIGHEST_POWER)
        r1 = uniform(SMALLEST, first, (heads,), source)
        r2 = uniform(SMALLEST, second, (heads,), source)
        self.raw_r1 = parameter(_inverse_softplus(r1))
        self.raw_r2 = parameter(_inverse_softplus(r2) if scheme.variant == "log" else _inverse_power(r2))

    def r1(self) -> Tensor:
        """Return the size of the penalty, [H], float32, > 0."""
        return nn.functional.softplus(self.raw_r1.float())

    def r2(self) -> Tensor:
        """Return the rate inside the logarithm, > 0, or the power, in (0, 2); [H], float32."""
        raw = self.raw_r2.float()
        return nn.functional.softplus(raw) if self.variant == "log" else HIGHEST_POWER * raw.sigmoid()

    def distance_bias(self, distances: Tensor) -> Tensor:
        length = distances.abs().float()  # [N]
        r1, r2 = self.r1()[:, None], self.r2()[:, None]  # [H, 1]
        grown = (r2 * length).log1p() if self.variant == "log" else length.pow(r2)
        return -r1 * grown

    def extra_repr(self) -> str:
        return f"variant={self.variant!r}, heads={len(self.raw_r1)}"


def _inverse_softplus(value: Tensor) -> Tensor:
    return value.expm1().log()


def _inverse_power(value: Tensor) -> Tensor:
    return (value / HIGHEST_POWER).logit(eps=1e-3)
