"""What a training minimises, always through the model's own forward: there DDP, FSDP and autocast are at work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_posswap.errors import ConfigError
from hf_posswap.training.chunked_loss import causal_loss, masked_loss
from hf_posswap.training.config import ObjectiveSettings
from hf_posswap.training.distill import distillation_loss

Objective = Callable[[Any, dict[str, Any], Tensor | int | None], Tensor]
"""From a model, the arguments of its forward with `labels` [B, L], and the number of counted tokens, to the loss."""
IGNORED = -100


def make_objective(settings: ObjectiveSettings, *, causal: bool, teacher: Any, window: int, chunk: int) -> Objective:
    """Return the loss of `settings`.

    Args:
        settings: of the recipe.
        causal: whether the model predicts the next token.
        teacher: the unswapped model, for distill and embedding.
        window: tokens that the unswapped model can read.
        chunk: tokens whose logits are held at once; 0: of all.

    Raises:
        ConfigError: the objective is not for this kind of model.
    """
    wanted = settings.kind in ("next-token", "distill")
    if wanted != causal:
        kind = "causal: it predicts the next token" if causal else "an encoder: it sees both sides"
        fit = "next-token or distill" if causal else "masked or embedding"
        raise ConfigError(f"objective.kind is {settings.kind}, and this model is {kind}. Use {fit}.")
    if settings.kind == "distill":
        return lambda model, inputs, items: distillation_loss(
            model, teacher, inputs, settings.distill, window=window, chunk=chunk or window, num_items=items
        )
    if settings.kind == "embedding":
        return lambda model, inputs, items: embedding_loss(model, teacher, inputs, items, window=window)
    if not chunk:
        return lambda model, inputs, items: whole_loss(model, inputs, items, causal=causal)
    loss = causal_loss if causal else masked_loss
    return lambda model, inputs, items: loss(model, inputs, chunk=chunk, num_items=items)


def whole_loss(model: Any, inputs: dict[str, Any], items: Tensor | int | None, *, causal: bool) -> Tensor:
    """Return the cross-entropy from the logits of the whole batch, [B, L, V] at once.

    Args:
        model: with a head over the vocabulary.
        inputs: arguments of its forward, with `labels` [B, L], or `shift_labels` [B, L] that are shifted already.
        items: what the sum is divided by; None: the counted tokens.
        causal: whether the label of a token is the next token's.
    """
    labels, shifted = inputs.get("labels"), inputs.get("shift_labels")
    logits = model(**{k: v for k, v in inputs.items() if k not in ("labels", "shift_labels")}).logits  # [B, L, V]
    if shifted is not None:
        labels = shifted
    elif causal:
        labels, logits = labels[:, 1:], logits[:, :-1]  # type: ignore[index]
    assert labels is not None
    flat = labels.reshape(-1).to(logits.device)
    total = functional.cross_entropy(logits.flatten(0, 1).float(), flat, ignore_index=IGNORED, reduction="sum")
    return total / ((flat != IGNORED).sum().clamp_min(1) if items is None else items)


def embedding_loss(
    model: Any, teacher: Any, inputs: dict[str, Any], items: Tensor | int | None, *, window: int
) -> Tensor:
    """Return one less the mean cosine of the pooled states of `model` and of the unswapped `teacher`.

    The teacher reads as much of each text as its window holds; the model reads all of it. A text counts as often as it
    has labels, so that the losses of micro-batches add up to that of the big batch.

    Args:
        model: an encoder, with any head.
        teacher: the unswapped one.
        inputs: `input_ids` [B, L] in which some tokens are masked, their originals in `labels` [B, L].
        items: labels of all micro-batches; None: of these.
        window: tokens that the teacher can read.
    """
    labels, ids = inputs["labels"], inputs["input_ids"]
    texts = torch.where(labels == IGNORED, ids, labels)
    mask = inputs.get("attention_mask")
    real = torch.ones_like(texts) if mask is None else mask
    with torch.no_grad():
        wanted = _pooled(teacher, texts[:, :window], real[:, :window])  # [B, E]
    distances = 1 - functional.cosine_similarity(_pooled(model, texts, real), wanted, dim=-1)  # [B]
    counted = (labels != IGNORED).sum(-1)  # [B]
    return (distances * counted).sum() / (counted.sum().clamp_min(1) if items is None else items)


def _pooled(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the last hidden states of the real tokens, [B, E], float32."""
    output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    states = output.hidden_states[-1].float()  # [B, L, E]
    weights = mask[..., None].to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1).clamp_min(1)
