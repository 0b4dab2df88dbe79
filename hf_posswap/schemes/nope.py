"""No position mechanism at all. Kazemnejad et al. 2023, https://arxiv.org/abs/2305.19466.

The logit scale: DroPE, https://arxiv.org/abs/2512.12167.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes.base import SCHEMES, Input, Kind, Scheme, Traits
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.mechanism import Mechanism


@SCHEMES.register("nope")
@dataclass(frozen=True)
class NoPE(Scheme):
    """Nothing: a causal decoder can infer order from its mask alone; an encoder cannot.

    Beyond the original length, the attention scores may be scaled by 1 + c ln s, which keeps attention as sharp
    as it was.

    Attributes:
        logit_scale: c, see `fit_logit_scale`; 0 does nothing until `set_logit_scale`; None has no scale at all, the
            only form that stock models support.
        pin: one length, in tokens, whose s = length/L all queries take; None takes for each query its own length.
        original_length: L, in tokens; None takes the model's own. Within it s is 1.

    Example:
        >>> NoPE().traits.causal_only
        True
        >>> str(NoPE(logit_scale=0.2, pin=4096))
        'nope(logit_scale=0.2, pin=4096)'

        Without positions, attention is a mean over a set. It cannot tell two sentences of the same words apart:

        >>> words = {"the": [0.1, 0.3], "dog": [1.0, 0.2], "chases": [0.3, 1.0], "pig": [0.9, 0.0]}
        >>> def chases(sentence):  # output at "chases", with its own vector as the query
        ...     states = torch.tensor([words[word] for word in sentence.split()])
        ...     return (states[2] @ states.T).softmax(dim=-1) @ states
        >>> one, other = chases("the dog chases the pig"), chases("the pig chases the dog")
        >>> torch.allclose(one, other)
        True
    """

    name: ClassVar[str] = "nope"
    summary: ClassVar[str] = "no positions; the causal mask is all that orders tokens"
    source: ClassVar[str] = "https://arxiv.org/abs/2305.19466"
    kind: ClassVar[Kind] = "none"
    inputs: ClassVar[tuple[Input, ...]] = ("text", "images")

    logit_scale: float | None = None
    pin: int | None = None
    original_length: int | None = None

    def __post_init__(self) -> None:
        if self.logit_scale is not None:
            checked = checks.number(self.name, "logit_scale", self.logit_scale, minimum=0.0, maximum=1e6)
            object.__setattr__(self, "logit_scale", checked)
        for field in ("pin", "original_length"):
            if getattr(self, field) is not None:
                checks.length(self.name, field, getattr(self, field))
        if self.pin is not None and self.logit_scale is None:
            raise SchemeError(f"{self.name}: pin={self.pin} acts through logit_scale, which is not given.")

    @property
    def acts_inside(self) -> bool:
        return self.logit_scale is not None

    @property
    def traits(self) -> Traits:
        return Traits(causal_only=True, relative=not self.acts_inside or self.pin is not None, shardable=True)

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        if not self.acts_inside:
            return resolved
        return dataclasses.replace(resolved, original_length=self.original_length or geometry.original_length)

    def mechanism(self, geometry: Geometry) -> NoPEMechanism:
        return NoPEMechanism(self)


class NoPEMechanism(Mechanism):
    """Leaves q and k as they are, but for the scale."""

    def __init__(self, scheme: NoPE) -> None:
        super().__init__()
        self.scheme, self.scales = scheme, scheme.acts_inside

    def scale(self, query_positions: Tensor) -> Tensor:
        assert self.scheme.logit_scale is not None
        pin = self.scheme.pin
        length = query_positions.float() + 1 if pin is None else torch.full_like(query_positions, pin).float()
        growth = (length / self.scheme.filled("original_length")).clamp(min=1.0)
        return 1 + self.scheme.logit_scale * growth.log()

    def extra_repr(self) -> str:
        return str(self.scheme)
