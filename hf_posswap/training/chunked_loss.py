"""Losses that hold the logits of a chunk of tokens at a time, never [L, V]."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def causal_loss(model: Any, inputs: dict[str, Any], *, chunk: int, num_items: Tensor | int | None = None) -> Tensor:
    """Return the next-token loss of a causal model, a scalar with a gradient, as `model(**inputs).loss` does.

    Args:
        model: a causal model, or a PEFT, DDP or FSDP2 wrapper around one.
        inputs: arguments of its forward, with `labels` [B, L]; -100 is not counted.
        chunk: tokens whose logits are held at a time.
        num_items: what the sum is divided by; None: the counted tokens. With gradient accumulation: those of all
            micro-batches, so that the gradients add up to the big batch's.
    """
    raise NotImplementedError


def masked_loss(model: Any, inputs: dict[str, Any], *, chunk: int, num_items: Tensor | int | None = None) -> Tensor:
    """Return the loss of a masked language model: as `causal_loss`, each label being its own token's."""
    raise NotImplementedError


def chunking_problem(model: Any, inputs: dict[str, Any], *, chunk: int, causal: bool) -> str | None:
    """Return why the chunked loss is not this model's own loss, or None where loss and gradients are proved equal.

    Runs both on a few tokens of `inputs`, without dropout and without touching gradients: once, before a run.
    """
    raise NotImplementedError
