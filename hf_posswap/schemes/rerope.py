"""ReRoPE and Leaky ReRoPE: distances beyond a window stop growing, or grow slowly; without training.

Su 2023, https://kexue.fm/archives/9708 (both), https://kexue.fm/archives/9731 (log scaling).

The author's released code (https://github.com/bojone/rerope) always scales queries by the logarithm of their position,
with L = 4096; here that is `log_scaling`, off by default, with the L of the model. Its window is 512 and its slowdown
16 for every model; here they follow from L and from the requested length. The distances are the same.
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
from hf_posswap.rope_math import widest
from hf_posswap.schemes.base import SCHEMES, Traits
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.common.piecewise import Far, PiecewiseMechanism, Windowed


@dataclass(frozen=True)
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
@dataclass(frozen=True)
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
@dataclass(frozen=True)
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
    def stand_ins(cls, geometry: Geometry) -> dict[str, Any]:
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
