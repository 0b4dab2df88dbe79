"""The base of probes, what rounding may do to their outputs, and a finer copy of a model whose precision hides it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from hf_posswap.compat.torch_modules import copy_module
from hf_posswap.compat.transformers_attention import attention_implementation, can_choose_attention, supports_sdpa
from hf_posswap.errors import SwapVerificationError
from hf_posswap.schemes.mechanism import Mechanism

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

LARGEST_COPY = 2**28
"""Parameters of the largest model that is copied to float64: 2 GiB. What is larger is trained, and no weak model."""
_JITTER = 1e-5
"""Relative change of embeddings, as large as the roundings by which the angles of far positions differ."""
_DRAWS = 8
Expected = Literal["same", "different"]


class NoEffectSeen(SwapVerificationError):
    """Something that must move the logits did not, as far as the precision of the model shows."""


@dataclass(frozen=True)
class Noise:
    """How far rounding alone moves logits.

    Attributes:
        least: no further than this where the arithmetic stays the same but for the order of sums: what moves them
            further has an effect.
        most: no further than this where the same numbers are made in other ways, as cos and sin of other positions.
        jitter: measures how far roundings of the embeddings move them, which takes several forwards.
    """

    least: float
    most: float
    jitter: Callable[[], float] = float

    def explains(self, moved: float, times: float = 1) -> bool:
        """Return whether logits that moved by `moved`, or by `times` as much as is usual, may stand for the same.

        Quantized layers compute in a coarser dtype than the model's, or round what comes in to integers: there the
        smallest change upstream moves the logits by a step of those.
        """
        return moved <= times * self.most or moved <= times * self.jitter()


def noise_of(model: PreTrainedModel, largest: float, again: float, precision: torch.dtype) -> Noise:
    """Return the noise of `model`, whose logits are up to `largest`.

    A swap without effect, whose tokens come in another order, was measured to move them by up to 3 roundings (models of
    2 layers, float32), and by less than one in float64.

    Args:
        model: that is run.
        largest: absolute value of its logits.
        again: how far its logits moved when the same was run twice: on a GPU sums have no order of their own.
        precision: in which the model itself computes; a finer copy still computes cos and sin in float32.
    """
    eps = torch.finfo(model.dtype).eps
    most = 0.3 * torch.finfo(precision).eps ** 0.5 * largest + 1e-6
    if model.dtype == precision:
        return Noise(max(min(32 * eps * largest, most), 4 * again), most)
    return Noise(max((1e4 * eps if _is_fine(model) else 2 * torch.finfo(torch.float32).eps) * largest, 4 * again), most)


def jitter_of(model: PreTrainedModel, probe: Probe) -> float:
    """Return how far the outputs of `probe` move when the embeddings are changed by a few roundings of float32."""
    generator, outputs = torch.Generator().manual_seed(0), probe.run(model)

    def change(module: nn.Module, args: object, out: object) -> object:
        if not isinstance(out, Tensor):
            return out
        return out * (1 + _JITTER * torch.randn(out.shape, generator=generator)).to(out)

    with model.get_input_embeddings().register_forward_hook(change):
        return max(gap(probe.run(model), outputs) for _ in range(_DRAWS))


def finer(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return a copy of a swapped `model` with its weights in float64; None where it is too large, or fine already."""
    weights = list(model.parameters())
    whole = not any(weight.is_meta for weight in weights) and all(weight.is_floating_point() for weight in weights)
    if not whole or model.dtype == torch.float64 or sum(weight.numel() for weight in weights) > LARGEST_COPY:
        return None
    copied = copy_module(model).double().eval()
    copied.set_experts_implementation("eager")  # grouped products know no float64
    if can_choose_attention(copied) and supports_sdpa(copied):
        copied.set_attn_implementation("sdpa")  # eager code makes its weights in float32
    return copied


def _is_fine(model: PreTrainedModel) -> bool:
    """Return whether a copy in float64 computes all of its scores so."""
    splits = any(module.splits for module in model.modules() if isinstance(module, Mechanism))
    return attention_implementation(model.config) == "sdpa" and not splits


class Probe(ABC):
    """A small input for a swapped model, and the checks that inputs of its kind allow."""

    outputs: ClassVar[str]
    """What `run` gives, in words."""

    @abstractmethod
    def run(self, model: nn.Module) -> Tensor:
        """Return the outputs on an input that shows slow angles as well, float32."""

    @abstractmethod
    def again(self, model: PreTrainedModel) -> float:
        """Return how far the outputs move when the same is run twice."""

    @abstractmethod
    def moved(self, model: PreTrainedModel, noise: Noise) -> dict[str, str]:
        """Return by the name of each check what was found when positions, or the order of the input, change.

        Raises:
            NoEffectSeen: nothing moved where it must.
            SwapVerificationError: something moved where it must not.
        """

    @abstractmethod
    def expected(self, model: PreTrainedModel) -> Expected:
        """Return how the outputs must compare with the unswapped model's."""

    @abstractmethod
    def comparable(self, model: PreTrainedModel) -> Tensor:
        """Return the outputs on an input that the unswapped model takes too."""


def gap(a: Tensor, b: Tensor) -> float:
    """Return how far two outputs lie apart."""
    return float((a - b).abs().max())
