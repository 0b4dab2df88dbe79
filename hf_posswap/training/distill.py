"""Staying close to the unswapped model: its next-token distributions as targets, within its window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class DistillSettings:
    """How to stay close to the unswapped model.

    Attributes:
        weight: share of the divergence in the loss, the rest being cross-entropy; in [0, 1].
        temperature: both distributions are flattened by it; the divergence is multiplied by its square.
    """

    weight: float = 0.5
    temperature: float = 1.0


def make_teacher(model: Any) -> Any:
    """Return a frozen copy of the swapped `model` as it was before the swap, in eval mode, on the same device."""
    raise NotImplementedError


def distillation_loss(
    model: Any,
    teacher: Any,
    inputs: dict[str, Any],
    settings: DistillSettings,
    *,
    window: int,
    chunk: int,
    num_items: Tensor | int | None = None,
) -> Tensor:
    """Return cross-entropy on all tokens, mixed with KL(teacher || model) on the first `window` tokens of each row.

    Args:
        model: that learns: a causal model, or a wrapper around one.
        teacher: a causal model of the same vocabulary, from `make_teacher` or another.
        inputs: arguments of the forward, with `labels` [B, L].
        settings: how much, how flat.
        window: tokens that the teacher can read.
        chunk: tokens whose logits are held at a time.
        num_items: what sums are divided by; None: the counted tokens.
    """
    raise NotImplementedError
