"""NTK-aware scaling, fixed and dynamic: a larger base instead of smaller positions.

Peng et al. 2023, https://arxiv.org/abs/2309.00071, definition 1 and appendix A.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.rope_math import default_inv_freq
from hf_posswap.schemes.base import SCHEMES
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.common.dynamic_rope import DynamicRope
from hf_posswap.schemes.scaled import ScaledRotary


@dataclass(frozen=True)
class StretchedBase(ScaledRotary):
    """Base of both: b' = b g^(R/(R-2)), which slows the slowest pair by g and leaves the fastest alone."""

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        dim = resolved.rotary_dim(geometry)
        if dim < 4:
            raise SchemeError(
                f"{self.name}: needs a rotary width of at least 4, here it is {dim}; use 'linear' or 'yarn' instead."
            )
        largest = resolved.stretched(resolved.growth(resolved.reach(geometry)), dim)
        if largest > checks.LARGEST:
            raise SchemeError(
                f"{self.name}: factor {resolved.factor:g} takes base {resolved.base:g} to {largest:g} over {dim} "
                f"dimensions, more than float32 holds ({checks.LARGEST:g}); give a smaller factor or base."
            )
        return resolved

    def growth(self, length: Any) -> Any:
        """Return g, a number or a tensor as `length` is, for sequences of `length` tokens."""
        raise NotImplementedError

    def stretched(self, growth: Any, dim: int) -> Any:
        """Return b', a number or a tensor as `growth` is."""
        return self.filled("base") * growth ** (dim / (dim - 2))


@SCHEMES.register("ntk")
@dataclass(frozen=True)
class NTK(StretchedBase):
    """NTK-aware scaling: b' = b s^(R/(R-2)). Peng et al. 2023, https://arxiv.org/abs/2309.00071, definition 1.

    The window that really works is shorter than s L.

    Example:
        >>> NTK(factor=2).factor
        2.0
    """

    name: ClassVar[str] = "ntk"
    summary: ClassVar[str] = "NTK-aware: a larger base, chosen from the factor"
    source: ClassVar[str] = "https://arxiv.org/abs/2309.00071"

    def growth(self, length: Any) -> Any:
        return self.filled("factor")

    def theta(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        dim = self.rotary_dim(geometry)
        return default_inv_freq(self.stretched(self.growth(None), dim), dim, dtype)

    def native_rope(self, geometry: Geometry) -> dict[str, Any]:
        base = self.stretched(self.growth(None), self.rotary_dim(geometry))
        return {"rope_type": "default", "rope_theta": base}


@SCHEMES.register("dynamic")
@dataclass(frozen=True)
class Dynamic(DynamicRope, StretchedBase):
    """Dynamic NTK: b' = b (s l/L - (s - 1))^(R/(R-2)) with l = max(current length, L).

    Within the original length it is plain RoPE. Beyond, the angles follow the current length, so as in stock
    transformers ("sequence") a token's representation depends on how much follows it.

    As a stock config (the native route) it is also stateful: transformers keeps the angles of the longest text that the
    model object has read for all later ones of L tokens or more, and resets them at a text shorter than L. The output
    for such a text then depends on what was read before it. Inside attention (site="attention", or a model without
    native rotation) each text has its own angles.
    Source: https://arxiv.org/abs/2309.00071, section 3.3 and appendix A; transformers' rope type "dynamic", which takes
    L from `max_position_embeddings`.

    Attributes:
        step: with follow="query", lengths beyond L are rounded up to L + a multiple of this, in tokens; each step
            within a text costs a rotation of all keys. None takes a quarter of L.

    Example:
        >>> Dynamic(factor=2, original_length=100).growth(150)
        2.0
        >>> Dynamic(factor=2, follow="query").traits.prefix_consistent
        True
    """

    name: ClassVar[str] = "dynamic"
    summary: ClassVar[str] = "dynamic NTK: the base grows with the length, of the text or of each token's past"
    source: ClassVar[str] = "https://arxiv.org/abs/2309.00071"

    step: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step is not None:
            checks.length(self.name, "step", self.step)
            if self.follow != "query":
                raise SchemeError(f"{self.name}: step={self.step} goes with follow='query', got {self.follow!r}.")

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        resolved = super().resolve(geometry, max_length)
        if self.follow != "query" or self.step is not None:
            return resolved
        return dataclasses.replace(resolved, step=max(1, resolved.filled("original_length") // 4))

    def rounding(self) -> str:
        return f"past {self.original_length}, rounded up by steps of {self.step}"

    def bucket(self, positions: Tensor) -> Tensor:
        beyond = positions + 1 - self.filled("original_length")  # tokens past L
        return (beyond.clamp(min=0) + self.filled("step") - 1) // self.filled("step")

    def first_of(self, bucket: int) -> int | None:
        return self.filled("original_length") + (bucket - 1) * self.filled("step")

    def bucket_length(self, bucket: int) -> int:
        return self.filled("original_length") + bucket * self.filled("step")

    def growth(self, length: Any) -> Any:
        original = self.filled("original_length")
        # equal to s l/L - (s - 1), without the cancellation that would lose float32 precision
        return 1 + self.filled("factor") * (length - original) / original

    def theta_at(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        if length is None:
            return self.plain(geometry, dtype)
        dim = self.rotary_dim(geometry)
        # to(dtype) because whole numbers would be divided in the default dtype, which may be bfloat16
        growth = self.growth(length.clamp(min=self.filled("original_length")).to(dtype))  # [..., 1]
        exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=length.device).to(dtype) / dim  # [R/2]
        return 1.0 / self.stretched(growth, dim) ** exponents  # [..., R/2]

    def native_rope(self, geometry: Geometry) -> dict[str, Any] | None:
        if self.follow == "query":
            return None
        if self.pin is not None:
            growth = self.growth(max(self.pin, self.filled("original_length")))
            return {"rope_type": "default", "rope_theta": self.stretched(growth, self.rotary_dim(geometry))}
        if self.filled("original_length") != geometry.original_length:
            return None  # transformers always takes L from max_position_embeddings
        return {"rope_type": "dynamic", "rope_theta": self.filled("base"), "factor": self.filled("factor")}
