"""Tests on the model itself that the chunked loss equals the model's own loss."""

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
    """Return how the chunked loss differs from this model's own loss, or None if loss and gradients are equal.

    Runs both on a few tokens of `inputs`, without dropout and without touching stored gradients: once, before a run.

    Args:
        model: with or without a PEFT adapter, not yet wrapped for several processes.
        inputs: a batch with `labels`.
        chunk: chunk size of the run; at most a quarter of the tokens is used here, so that there are several chunks.
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
        model_loss = model(**batch | without_cache(inner)).loss
        chunked_loss = loss(model, batch, chunk=max(1, min(chunk, batch["input_ids"].numel() // 4)))
        difference = _relative_error(chunked_loss, model_loss)
        if not difference <= _tolerance(inner):
            return f"{type(inner).__name__} has a loss of {model_loss:.6g}, and {chunked_loss:.6g} in chunks"
        gradients = [
            torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
            for value in (model_loss, chunked_loss)
        ]
    except UnsupportedModelError as error:
        return str(error)
    finally:
        model.train(training)
    parameter = _differing_gradient(list(parameters), *gradients, tolerance=10 * _tolerance(inner))
    return parameter and f"{type(inner).__name__} in chunks gives {parameter} a different gradient than its own loss"


def _differing_gradient(
    names: list[str],
    model_gradients: tuple[Tensor | None, ...],
    chunked_gradients: tuple[Tensor | None, ...],
    *,
    tolerance: float,
) -> str | None:
    """Return the name of a parameter whose gradients differ by more than noise, or None."""
    largest = max((float(gradient.float().norm()) for gradient in model_gradients if gradient is not None), default=0.0)
    for name, expected, actual in zip(names, model_gradients, chunked_gradients, strict=True):
        if (expected is None) != (actual is None):
            return name
        if expected is not None and actual is not None:
            difference = float((expected.float() - actual.float()).norm())
            if not difference <= tolerance * (float(expected.float().norm()) + 0.01 * largest):
                return name
    return None


def _few_tokens(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the first tokens of the row with the most labels among them."""
    labels = inputs["labels"]
    row = int((labels[:, :_TOKENS] != IGNORED).sum(-1).argmax())
    batch: dict[str, Any] = {}
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            batch[name] = value
        elif value.ndim == 4:  # a mask of packed documents
            batch[name] = value[row : row + 1, :, :_TOKENS, :_TOKENS].to(device)
        else:
            batch[name] = value[row : row + 1, :_TOKENS].to(device)
    return batch


def _some_parameters(model: Any) -> dict[str, Tensor]:
    """Return up to 24 trained parameters, half from the start and half from the end, so that the head is included."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel() <= _LARGEST}
    names = list(trained)
    half = _PARAMETERS // 2
    chosen = names if len(names) <= _PARAMETERS else [*names[:half], *names[-half:]]
    return {name: trained[name] for name in chosen}


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().float(), expected.detach().float()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-6))


def _tolerance(inner: Any) -> float:
    return 1e-4 if inner.dtype == torch.float32 else 1e-2
