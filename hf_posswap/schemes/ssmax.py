"""Scalable-Softmax: scores that grow with the logarithm of the number of keys. Nakanishi 2025, arXiv 2501.19399."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from hf_posswap.geometry import Geometry
from hf_posswap.schemes.base import TERMS, Kind, Scheme, Traits
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.mechanism import Mechanism


@TERMS.register("ssmax")
@dataclass(frozen=True)
class SSMax(Scheme):
    """Scalable-Softmax: the scores of a query that sees n keys are multiplied by s_h ln n, s_h learned by head.

    A softmax over more keys is flatter; this keeps it as sharp at every length. It is no position mechanism: add it to
    one, as in `native() + SSMax()` or `Rope() + SSMax()`. n is position + 1, and in a model whose layers all have a
    sliding window at most that window; where only some have one, n is position + 1 in all of them.

    Attributes:
        s: s_h at the start, for every head; None takes 1 / mean(ln n) over the original window, with which the scores
            of the trained lengths keep their mean scale.

    Example:
        >>> geometry = Geometry(8, 2, 2, 4, 1, original_length=64, causal=True)
        >>> mechanism = SSMax(s=0.5).mechanism(geometry)
        >>> mechanism.scale(torch.tensor([[0, 7, 63]])).shape  # [1, H, Q]
        torch.Size([1, 2, 3])
    """

    name: ClassVar[str] = "ssmax"
    summary: ClassVar[str] = "Scalable-Softmax: learned query scale s ln n; to add to another scheme"
    source: ClassVar[str] = "https://arxiv.org/abs/2501.19399"
    kind: ClassVar[Kind] = "none"
    standalone: ClassVar[bool] = False

    s: float | None = None

    def __post_init__(self) -> None:
        if self.s is not None:
            object.__setattr__(self, "s", checks.number(self.name, "s", self.s, above=0.0, maximum=1e6))

    @property
    def acts_inside(self) -> bool:
        return True

    @property
    def traits(self) -> Traits:
        return Traits(causal_only=True, relative=False)

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        length = geometry.original_length
        seen = min(length, geometry.sliding_window or length)
        # the mean of ln 1 to ln L is ln(L!) / L, and from a sliding window on ln n stands; of one token it is 0
        mean = (math.lgamma(seen + 1) + (length - seen) * math.log(seen)) / length
        return resolved if self.s is not None else dataclasses.replace(resolved, s=1 / mean if mean else 1.0)

    def mechanism(self, geometry: Geometry) -> Mechanism:
        return SSMaxMechanism(self.filled("s"), geometry.num_heads, geometry.sliding_window)


class SSMaxMechanism(Mechanism):
    """Multiplies each query by s_h ln n."""

    scales = True

    def __init__(self, s: float, heads: int, window: int | None) -> None:
        super().__init__()
        self.window = math.inf if window is None else window
        self.s = nn.Parameter(torch.full((heads,), s, dtype=torch.float32))  # [H]

    def scale(self, query_positions: Tensor) -> Tensor:
        # the first token sees one key: any scale serves it; padding may have positions below 0
        seen = (query_positions.float() + 1).clamp(1.0, self.window)  # [B or 1, Q]
        return self.s.float()[:, None] * seen.log()[:, None]  # [B or 1, H, Q]
