"""Self-Extend: exact distances nearby, grouped ones far away, without training.

Jin et al. 2024, https://arxiv.org/abs/2401.01325, equations 3 and 4.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.rope_math import groups_of
from hf_posswap.schemes.base import SCHEMES
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.common.piecewise import Far, Windowed


@SCHEMES.register("self_extend")
@dataclass(frozen=True)
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
    def stand_ins(cls, geometry: Geometry) -> dict[str, Any]:
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
