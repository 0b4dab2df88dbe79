"""Checks before the first step: positions in range, and a first loss as the plan predicts.

The first loss, or the vectors of texts, are compared with those of the unswapped model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hf_posswap.errors import DataError, PositionRangeError, TrainingError, UnsupportedModelError
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.schemes.rope import RotaryScheme
from hf_posswap.training.chunked_loss import IGNORED, causal_loss, masked_loss
from hf_posswap.training.config import SENTENCES, Recipe
from hf_posswap.training.data import TokenWindows
from hf_posswap.training.engine.objectives import whole_loss
from hf_posswap.training.engine.sentences import Pooling, all_vectors, distance
from hf_posswap.utils.devices import evaluating

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_ROWS = 2
_CHUNK = 512
_SHORT_WINDOWS = 8
_LOOKED_AT = 64
_NO_TRAINING_LIMIT, _TRAINING_LIMIT, _GUESSING_LIMIT = 0.25, 1.5, 1.5
"""Nats above the unswapped model's loss that a plan allows, without and with training; and nats above guessing."""


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
        """The loss of a uniform guess."""
        return math.log(self.vocabulary)


def check_reads_text(model: PreTrainedModel, kind: str) -> None:
    """Refuse a model that does not read text alone, or lacks the vocabulary head that `kind` needs.

    Args:
        model: of the recipe.
        kind: `objective.kind`.

    Raises:
        UnsupportedModelError: it is an encoder-decoder, reads images or audio, or has another head.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder, and recipes train decoders and encoders. Swap it with patch_model in a "
            "script, and train it on pairs of texts with transformers' Seq2SeqTrainer."
        )
    if model.main_input_name != "input_ids":
        raise UnsupportedModelError(
            f"{name} reads {model.main_input_name}, and recipes train text models. Swap it with patch_model in a "
            "script, and train it with transformers' Trainer."
        )
    if kind not in SENTENCES and model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{name} has no head over the vocabulary, which objective.kind {kind} trains. Start from a checkpoint of "
            "a ...ForCausalLM or ...ForMaskedLM class, or take objective.kind embedding."
        )


def probe(model: PreTrainedModel, batch: dict[str, Any], *, causal: bool, plain: int | None = None) -> float:
    """Return the mean loss of `model` on two rows of `batch`, in eval mode, without a gradient.

    Args:
        model: on any device.
        batch: arguments of its forward, with labels.
        causal: whether it predicts the next token.
        plain: if given, read only that many tokens of each row, at positions from 0, ignoring positions and mask.
    """
    rows = {k: v[:_ROWS].to(model.device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    if plain is not None:
        rows = {k: rows[k][:, :plain] for k in ("input_ids", "labels")}
        rows["attention_mask"] = torch.ones_like(rows["input_ids"])
    with evaluating(model), torch.no_grad():
        return float(_loss(model, rows, causal))


def _loss(model: PreTrainedModel, rows: dict[str, object], causal: bool) -> Tensor:
    """Return the chunked loss, or the loss from all logits for models that do not support chunks."""
    try:
        return (causal_loss if causal else masked_loss)(model, rows, chunk=_CHUNK)
    except UnsupportedModelError:
        return whole_loss(model, rows, None, causal=causal)


def check_positions(batch: dict[str, Tensor], length: int, reach: int, first: int, *, unbounded: bool) -> None:
    """Check that no position of `batch` is beyond the model's range.

    Args:
        batch: arguments of the forward.
        length: tokens of a window.
        reach: positions that the model is meant for.
        first: value of position 0 in its `position_ids`.
        unbounded: whether the scheme runs at any length.

    Raises:
        PositionRangeError: one is; names the settings that disagree.
    """
    positions = batch.get("position_ids")
    farthest = length if positions is None else int(positions.max()) - first + 1
    if farthest > reach and not unbounded:
        raise PositionRangeError(
            f"the windows reach position {farthest - 1}, and the model is meant for {reach} positions (0 to "
            f"{reach - 1}): set swap.max_length to {farthest}, or a smaller data.length than {length}."
        )


def short_of_window(length: int, window: int, batch: dict[str, Tensor], plan: SwapPlan | None) -> str | None:
    """Return a warning if windows are shorter than the unswapped model's, and the swap scales its rotation.

    Args:
        length: tokens of a window.
        window: of the unswapped model.
        batch: arguments of the forward; short windows are fine if `position_ids` reach far.
        plan: of the swap; None: there is none.
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
    """Check that some held-out document is as long as the longest of `lengths`.

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
    """Return the highest first loss that `plan` predicts.

    Args:
        plan: of the swap; None: there is none.
        first: of the unswapped model.
        above: the recipe's limit in nats above that loss; None: the plan's.
    """
    if above is not None:
        return first.before + above
    if plan is None or plan.adaptation.startswith("none"):
        return first.before + _NO_TRAINING_LIMIT
    if "required" in plan.adaptation:
        return max(first.before + _TRAINING_LIMIT, first.uniform + _GUESSING_LIMIT)
    return first.before + _TRAINING_LIMIT


def check_first_loss(
    loss: float, plain: Callable[[], float], first: FirstLoss, plan: SwapPlan | None, above: float | None
) -> str:
    """Return a sentence on the first loss if it is as predicted.

    Args:
        loss: of the swapped model on the batch.
        plain: measures that of the swapped model on the tokens that the unswapped one read, at positions 0, 1, 2, ...;
            called only to find the cause of a higher loss.
        first: of the unswapped model.
        plan: of the swap; None: there is none.
        above: as in `predicted_limit`.

    Raises:
        TrainingError: it is higher; names the likely cause.
    """
    limit = predicted_limit(plan, first, above)
    message = f"first loss {loss:.3f}, {first.before:.3f} before the swap"
    if math.isfinite(loss) and loss <= limit:
        return message + f" (at most {limit:.2f} was predicted)"
    raise TrainingError(
        f"{message}: the plan predicts at most {limit:.2f}. Likely cause: {_cause(plain(), limit, first, plan)} "
        "gates.start_above sets the limit; gates.start=false skips the check."
    )


def _cause(plain: float, limit: float, first: FirstLoss, plan: SwapPlan | None) -> str:
    if first.before > first.uniform - 0.1:
        return (
            f"the unswapped model itself is no better than guessing ({first.uniform:.2f}): a wrong tokenizer, or "
            "untrained weights."
        )
    if math.isfinite(plain) and plain <= limit:
        return (
            "the positions or masks of data.packing, or windows longer than the scheme extrapolates: on the same "
            f"tokens at positions 0, 1, 2, ... the swapped model has {plain:.3f}."
        )
    if plan is None:
        return "the data: without a swap, the model cannot read these windows."
    return (
        f"the fields of {plan.scheme} (base, layout, factor or original_length) do not fit this model; or they do, and "
        "it bears the change worse than most, as small models do."
    )


def short_windows(
    documents: Sequence[np.ndarray], window: int, counted: Sequence[np.ndarray] | None = None
) -> dict[str, Tensor]:
    """Return the first `window` tokens of up to eight held-out `documents` and their labels, [N, window] each.

    Without a document of that length, those of the longest are returned.

    Args:
        documents: token ids of each.
        window: tokens to take.
        counted: whether the loss counts each token; None: it counts all. Documents without one in the window are left
            out, unless there are no others: then all tokens are counted.
    """
    flags = [np.ones(len(ids), dtype=bool) for ids in documents] if counted is None else counted
    pairs = [(ids[:window], kept[:window]) for ids, kept in zip(documents, flags, strict=True)]
    pairs = [pair for pair in pairs if pair[1][1:].any()] or [(ids, np.ones_like(kept)) for ids, kept in pairs]
    chosen = [pair for pair in pairs if len(pair[0]) == window][:_SHORT_WINDOWS] or [
        max(pairs, key=lambda pair: len(pair[0]))
    ]
    ids, kept = (torch.from_numpy(np.stack(rows)) for rows in zip(*chosen, strict=True))
    return {"input_ids": ids.long(), "labels": ids.long().masked_fill(~kept, IGNORED)}


def windows_with_loss(windows: Sequence[dict[str, Tensor]] | TokenWindows, most: int, *, rows: int = 2) -> list[int]:
    """Return the first `rows` windows in whose first `most` tokens the loss counts one; []: none of the first 64 has.

    If there are fewer, they are repeated.
    """
    numbers: list[int] = []
    for number in range(min(len(windows), _LOOKED_AT)):
        if bool((windows[number]["labels"][1:most] != IGNORED).any()):
            numbers.append(number)
        if len(numbers) == rows:
            break
    return (numbers * rows)[:rows]


class Start(Protocol):
    """Measurements of the unswapped model."""

    def check(self, model: PreTrainedModel, plan: SwapPlan | None, above: float | None) -> str:
        """Return a sentence on the swapped `model` if it starts as `plan` predicts; raise a TrainingError otherwise.

        Args:
            model: swapped.
            plan: of the swap; None: there is none.
            above: the recipe's gates.start_above.
        """


def measure_start(
    recipe: Recipe,
    model: PreTrainedModel,
    batch: dict[str, object],
    *,
    causal: bool,
    window: int,
    pooling: Pooling | None,
) -> Start:
    """Measure the unswapped `model` on `batch`, up to its window.

    Args:
        recipe: without stages.
        model: not yet swapped, on its device.
        batch: arguments of its forward, with labels.
        causal: whether it predicts the next token.
        window: tokens that it can read.
        pooling: of its states, for objectives on text vectors.
    """
    if recipe.objective.kind in SENTENCES:
        assert pooling is not None
        return _Vectors(model, batch, pooling, window)
    return _Loss(model, batch, causal, window)


class _Loss:
    def __init__(self, model: PreTrainedModel, batch: dict[str, object], causal: bool, window: int) -> None:
        self.batch, self.causal, self.window = batch, causal, window
        before = probe(model, batch, causal=causal, plain=window)
        self.before = FirstLoss(before, model.config.get_text_config().vocab_size)

    def check(self, model: PreTrainedModel, plan: SwapPlan | None, above: float | None) -> str:
        loss = probe(model, self.batch, causal=self.causal)
        plain = partial(probe, model, self.batch, causal=self.causal, plain=self.window)
        return check_first_loss(loss, plain, self.before, plan, above)


class _Vectors:
    """Measures how far the swap moves the vectors of texts."""

    def __init__(self, model: nn.Module, batch: dict[str, Any], pooling: Pooling, window: int) -> None:
        self.batch, self.pooling, self.window = batch, pooling, window
        self.before = all_vectors(model, pooling, batch, plain=window)

    def check(self, model: PreTrainedModel, plan: SwapPlan | None, above: float | None) -> str:
        moved = distance(all_vectors(model, self.pooling, self.batch, plain=self.window), self.before)
        message = f"the swap moved the vectors of texts by {moved:.3f} (1 - cosine)"
        if math.isfinite(moved) and (above is None or moved <= above):
            return message
        raise TrainingError(
            f"{message}, and gates.start_above allows {'any finite number' if above is None else above}. "
            f"Likely cause: the fields of {None if plan is None else plan.scheme} do not fit this model. "
            "gates.start=false skips the check."
        )
