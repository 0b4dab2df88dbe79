"""What must hold before the first step: positions in range, and a first loss such as the plan predicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_posswap.errors import DataError, PositionRangeError, TrainingError, UnsupportedModelError
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.schemes.rope import RotaryScheme
from hf_posswap.training.chunked_loss import causal_loss, masked_loss
from hf_posswap.training.config import SENTENCES
from hf_posswap.training.engine.objectives import whole_loss

_ROWS = 2
_CHUNK = 512
_SHORT_WINDOWS = 8
_NONE, _SOME, _UNIFORM = 0.25, 1.5, 1.5
"""Nats above the unswapped model's loss that a plan predicts: without need of training, with; and above guessing."""


@dataclass(frozen=True)
class FirstLoss:
    """One batch's loss.

    Attributes:
        before: of the unswapped model, on as much of the batch as its window holds.
        vocabulary: of the model.
    """

    before: float
    vocabulary: int

    @property
    def uniform(self) -> float:
        """The loss of guessing every token alike."""
        return math.log(self.vocabulary)


def check_reads_text(model: Any, kind: str) -> None:
    """Refuse a model that is not trained on one text, or that says nothing of its tokens where `kind` asks.

    Args:
        model: of the recipe.
        kind: `objective.kind`.

    Raises:
        UnsupportedModelError: it reads one text and writes another, sees images or hears, or has another head.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{name} reads a text with its encoder and writes another with its decoder; recipes train models of one "
            "text, decoders and encoders. Swap it by patch_model in a script, and train it on pairs of texts by "
            "transformers' Seq2SeqTrainer."
        )
    if model.main_input_name != "input_ids":
        raise UnsupportedModelError(
            f"{name} reads {model.main_input_name}, and recipes train models of text. Swap it by patch_model in a "
            "script, and train it by transformers' Trainer."
        )
    if kind not in SENTENCES and model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{name} has no head over the vocabulary, which objective.kind {kind} trains. Start from a checkpoint of "
            "a ...ForCausalLM or ...ForMaskedLM class, or take objective.kind embedding."
        )


def probe(model: Any, batch: dict[str, Any], *, causal: bool, plain: int | None = None) -> float:
    """Return the mean loss of `model` on two rows of `batch`, in eval mode, without a gradient.

    Args:
        model: on any device.
        batch: arguments of its forward, with labels.
        causal: whether it predicts the next token.
        plain: read so many tokens of each row only, from position 0 on, whatever positions and mask say.
    """
    rows = {k: v[:_ROWS].to(model.device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    if plain is not None:
        rows = {k: rows[k][:, :plain] for k in ("input_ids", "labels")}
        rows["attention_mask"] = torch.ones_like(rows["input_ids"])
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return float(_loss(model, rows, causal))
    finally:
        model.train(training)


def _loss(model: Any, rows: dict[str, Any], causal: bool) -> Tensor:
    """Return the loss with the logits of some tokens at a time; of models that cannot do so, with all logits."""
    try:
        return (causal_loss if causal else masked_loss)(model, rows, chunk=_CHUNK)
    except UnsupportedModelError:
        return whole_loss(model, rows, None, causal=causal)


def check_positions(batch: dict[str, Any], length: int, reach: int, first: int, *, unbounded: bool) -> None:
    """Check that no position of `batch` lies beyond what the model is meant for.

    Args:
        batch: arguments of the forward.
        length: tokens of a window.
        reach: positions that the model is meant for.
        first: what its `position_ids` call position 0.
        unbounded: whether the scheme runs at any length.

    Raises:
        PositionRangeError: one does; says which settings disagree.
    """
    positions = batch.get("position_ids")
    farthest = length if positions is None else int(positions.max()) - first + 1
    if farthest > reach and not unbounded:
        raise PositionRangeError(
            f"the windows reach position {farthest - 1}, and the model is meant for {reach} positions (0 to "
            f"{reach - 1}): set swap.max_length to {farthest}, or a smaller data.length than {length}."
        )


def short_of_window(length: int, window: int, batch: dict[str, Any], plan: SwapPlan | None) -> str | None:
    """Return a warning where windows are shorter than the unswapped model's, and the swap scales its rotation.

    Args:
        length: tokens of a window.
        window: of the unswapped model.
        batch: arguments of the forward; with `position_ids` windows may be short, as they reach far or are packed.
        plan: of the swap; None: there is none.

    Returns:
        None: there is nothing to warn of.
    """
    if plan is None or length >= window or not isinstance(plan.scheme, RotaryScheme) or not plan.sites.rotary:
        return None
    if "position_ids" in batch and int((batch["position_ids"][:, -1] - batch["position_ids"][:, 0]).max()) >= window:
        return None
    return (
        f"warning: windows of {length} tokens (data.length) are shorter than the {window} that the unswapped model "
        f"reads, and the swap is for {plan.max_length}: the new angles are trained at no distance above {length}. "
        f"Set data.length above {window}, or data.packing=pose, which trains far positions in short windows."
    )


def check_held_out(documents: Sequence[np.ndarray], lengths: Sequence[int]) -> None:
    """Check that a held-out document is as long as the longest of `lengths`.

    Raises:
        DataError: none is.
    """
    longest = max(map(len, documents), default=0)
    if lengths and longest < max(lengths):
        raise DataError(
            f"no held-out document has {max(lengths)} tokens (the longest has {longest}): give longer documents, or "
            "shorter evaluation.lengths."
        )


def predicted_limit(plan: SwapPlan | None, first: FirstLoss, above: float | None) -> float:
    """Return the first loss that `plan` allows for.

    Args:
        plan: of the swap; None: there is none.
        first: of the unswapped model.
        above: nats above that, as the recipe says; None: what the plan predicts.
    """
    if above is not None:
        return first.before + above
    if plan is None or plan.adaptation.startswith("none"):
        return first.before + _NONE
    if "required" in plan.adaptation:
        return max(first.before + _SOME, first.uniform + _UNIFORM)
    return first.before + _SOME


def check_first_loss(loss: float, plain: float, first: FirstLoss, plan: SwapPlan | None, above: float | None) -> str:
    """Return a sentence on the first loss, which is as predicted.

    Args:
        loss: of the swapped model on the batch as it is.
        plain: of the swapped model on the tokens that the unswapped one read, at positions 0, 1, 2, ...
        first: of the unswapped model.
        plan: of the swap; None: there is none.
        above: as in `predicted_limit`.

    Raises:
        TrainingError: it is not; with the likely cause.
    """
    limit = predicted_limit(plan, first, above)
    said = f"first loss {loss:.3f}, {first.before:.3f} before the swap"
    if math.isfinite(loss) and loss <= limit:
        return said + f" (at most {limit:.2f} was predicted)"
    raise TrainingError(
        f"{said}: the plan predicts at most {limit:.2f}. Likely cause: {_cause(plain, limit, first, plan)} "
        "gates.start_above says how far it may stand above; gates.start=false starts all the same."
    )


def _cause(plain: float, limit: float, first: FirstLoss, plan: SwapPlan | None) -> str:
    if first.before > first.uniform - 0.1:
        return (
            f"the unswapped model itself is no better than guessing ({first.uniform:.2f}): another model's tokenizer, "
            "or weights that were never trained."
        )
    if math.isfinite(plain) and plain <= limit:
        return (
            f"the positions or masks of data.packing, or windows longer than the scheme carries the model: on the same "
            f"tokens at positions 0, 1, 2, ... the swapped model has {plain:.3f}."
        )
    if plan is None:
        return "the data: there is no swap, so the model reads windows it was not made for."
    return f"the fields of {plan.scheme}: base, layout, factor or original_length do not fit this model."


def short_windows(documents: Sequence[np.ndarray], window: int) -> Tensor:
    """Return the first `window` tokens of up to eight held-out `documents`, [N, window]; of shorter ones, fewer."""
    long = [document[:window] for document in documents if len(document) >= window][:_SHORT_WINDOWS]
    if not long:
        longest = max(documents, key=len)
        long = [longest]
    return torch.from_numpy(np.stack(long).astype(np.int64))
