"""Proof, on the model itself, that a loss in chunks is the model's own loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posswap.errors import UnsupportedModelError
from hf_posswap.training.chunked_loss import IGNORED, causal_loss, masked_loss
from hf_posswap.training.head import inner_model, without_cache

_TOKENS = 64
_PARAMETERS = 24  # whose gradients are compared
_LARGEST = 1 << 27  # elements of one of them


def chunking_problem(model: Any, inputs: dict[str, Any], *, chunk: int, causal: bool) -> str | None:
    """Return why the loss in chunks is not this model's own loss, or None where loss and gradients are proved equal.

    Runs both on a few tokens of `inputs`, without dropout and without touching gradients: once, before a run.

    Args:
        model: possibly around a PEFT adapter, not yet wrapped for several processes.
        inputs: a batch with `labels`.
        chunk: that the run will use; here at most a quarter of the tokens, so that there are several.
        causal: whether the model predicts the next token.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> ids = torch.arange(10)[None]
        >>> chunking_problem(model, {"input_ids": ids, "labels": ids}, chunk=64, causal=True)
    """
    try:
        inner = inner_model(model)
    except UnsupportedModelError as error:
        return str(error)
    batch = _few_tokens(inputs, inner.device)
    loss = causal_loss if causal else masked_loss
    parameters = _some_parameters(model)
    training = model.training
    model.eval()
    try:
        own = model(**batch | without_cache(inner)).loss
        ours = loss(model, batch, chunk=max(1, min(chunk, batch["input_ids"].numel() // 4)))
        gap = _relative(ours, own)
        if not gap <= _allowed(inner):
            return f"{type(inner).__name__} gives a loss of {own:.6g} and the same in chunks {ours:.6g}"
        gradients = [torch.autograd.grad(value, list(parameters.values()), allow_unused=True) for value in (own, ours)]
    except UnsupportedModelError as error:
        return str(error)
    finally:
        model.train(training)
    wrong = _another_gradient(list(parameters), *gradients, tolerance=10 * _allowed(inner))
    return wrong and f"{type(inner).__name__} in chunks gives {wrong} another gradient than its own loss does"


def _another_gradient(
    names: list[str], own: tuple[Tensor | None, ...], ours: tuple[Tensor | None, ...], *, tolerance: float
) -> str | None:
    """Return the name of a parameter whose gradients differ; those that are zero but for noise count as equal."""
    largest = max((float(gradient.float().norm()) for gradient in own if gradient is not None), default=0.0)
    for name, one, other in zip(names, own, ours, strict=True):
        if (one is None) != (other is None):
            return name
        if one is not None and other is not None:
            gap = float((one.float() - other.float()).norm())
            if not gap <= tolerance * (float(one.float().norm()) + 0.01 * largest):
                return name
    return None


def _few_tokens(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the first tokens of the row that counts most of them."""
    labels = inputs["labels"]
    row = int((labels[:, :_TOKENS] != IGNORED).sum(-1).argmax())
    held: dict[str, Any] = {}
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            held[name] = value
        elif value.ndim == 4:  # a mask of packed documents
            held[name] = value[row : row + 1, :, :_TOKENS, :_TOKENS].to(device)
        else:
            held[name] = value[row : row + 1, :_TOKENS].to(device)
    return held


def _some_parameters(model: Any) -> dict[str, Tensor]:
    """Return up to 24 trained parameters from the first to the last; those of the head are the first or the last."""
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel() <= _LARGEST}
    names = list(learned)
    half = _PARAMETERS // 2
    chosen = names if len(names) <= _PARAMETERS else [*names[:half], *names[-half:]]
    return {name: learned[name] for name in chosen}


def _relative(one: Tensor, other: Tensor) -> float:
    one, other = one.detach().float(), other.detach().float()
    return float((one - other).norm() / other.norm().clamp_min(1e-6))


def _allowed(inner: Any) -> float:
    return 1e-4 if inner.dtype == torch.float32 else 1e-2
