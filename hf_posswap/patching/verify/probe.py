"""What every probe of a swapped model does: an input, what happens when positions change, and what must stay."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

from torch import Tensor

from hf_posswap.patching.verify.noise import Noise

Expected = Literal["same", "different"]


class Probe(ABC):
    """A small input for a swapped model, and the checks that inputs of its kind allow."""

    outputs: ClassVar[str]
    """What `run` gives, in words."""

    @abstractmethod
    def run(self, model: Any) -> Tensor:
        """Return the outputs on an input that shows slow angles as well, float32."""

    @abstractmethod
    def again(self, model: Any) -> float:
        """Return how far the outputs move when the same is run twice."""

    @abstractmethod
    def moved(self, model: Any, noise: Noise) -> dict[str, str]:
        """Return by the name of each check what was found when positions, or the order of the input, change.

        Raises:
            NoEffectSeen: nothing moved where it must.
            SwapVerificationError: something moved where it must not.
        """

    @abstractmethod
    def expected(self, model: Any) -> Expected:
        """Return how the outputs must compare with the unswapped model's."""

    @abstractmethod
    def comparable(self, model: Any) -> Tensor:
        """Return the outputs on an input that the unswapped model takes too."""


def gap(a: Tensor, b: Tensor) -> float:
    """Return how far two outputs lie apart."""
    return float((a - b).abs().max())
