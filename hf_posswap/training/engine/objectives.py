"""The losses of a training, always computed through the model's own forward, so that DDP, FSDP and autocast apply."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional

from hf_posswap.errors import ConfigError
from hf_posswap.training.chunked_loss import causal_loss, masked_loss
from hf_posswap.training.config import SENTENCES, ObjectiveSettings
from hf_posswap.training.distill import distillation_loss
from hf_posswap.training.engine.sentences import Around, Pooling, contrastive_loss, embedding_loss
from hf_posswap.training.longce import longce_loss

if TYPE_CHECKING:
    from torch import nn

Objective = Callable[[Any, dict[str, Any], Tensor | int | None], Tensor]
"""From a model, its forward arguments with `labels` [B, L], and the number of counted tokens, to the loss."""
IGNORED = -100


def make_objective(
    settings: ObjectiveSettings,
    *,
    causal: bool,
    teacher: Any,
    window: int,
    chunk: int,
    pooling: Pooling | None = None,
    around: Around = (0, 0),
) -> Objective:
    """Return the loss of `settings`.

    Args:
        settings: of the recipe.
        causal: whether the model predicts the next token.
        teacher: the unswapped model, for distill and embedding.
        window: tokens that the unswapped model can read.
        chunk: tokens whose logits are held at once; 0: all.
        pooling: for embedding and contrastive.
        around: special tokens before and after a text, for contrastive.

    Raises:
        ConfigError: the objective is not for this kind of model.
    """
    if settings.predicts_next_token != causal:
        model_kind = "causal: it predicts the next token" if causal else "an encoder: it sees both sides"
        alternatives = "next-token, longce or distill" if causal else "masked, embedding or contrastive"
        raise ConfigError(f"objective.kind is {settings.kind}, and this model is {model_kind}. Use {alternatives}.")
    if settings.kind == "distill":
        return lambda model, inputs, items: distillation_loss(
            model, teacher, inputs, settings.distill, window=window, chunk=chunk or window, num_items=items
        )
    if settings.kind == "longce":
        return lambda model, inputs, items: longce_loss(
            model, inputs, settings.longce, chunk=chunk or window, num_items=items
        )
    if settings.kind in SENTENCES:
        assert pooling is not None
        if settings.kind == "embedding":
            return lambda model, inputs, items: embedding_loss(model, teacher, pooling, inputs, items, window=window)
        return lambda model, inputs, items: contrastive_loss(
            model, pooling, inputs, items, scale=settings.scale, around=around
        )
    if not chunk:
        return lambda model, inputs, items: whole_loss(model, inputs, items, causal=causal)
    loss = causal_loss if causal else masked_loss
    return lambda model, inputs, items: loss(model, inputs, chunk=chunk, num_items=items)


def whole_loss(model: nn.Module, inputs: dict[str, Any], items: Tensor | int | None, *, causal: bool) -> Tensor:
    """Return the cross-entropy from the logits of the whole batch, [B, L, V] at once.

    Args:
        model: with a head over the vocabulary.
        inputs: arguments of its forward, with `labels` [B, L], or already shifted `shift_labels` [B, L].
        items: divisor of the sum; None: the counted tokens.
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
