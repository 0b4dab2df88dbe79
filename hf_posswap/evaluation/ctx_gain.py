"""Whether far context is used: the same last tokens are read with more and more context. Metric `ctx_gain`.

A flat perplexity curve does not prove it, because a model that ignores far context has a flat curve, too. The last T
tokens of a document are read from position 0 with c tokens of context before them; gain(c) = NLL(c_ref) - NLL(c), where
c_ref is the context that fits the original window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hf_posswap.errors import DataError
from hf_posswap.evaluation.scoring import Scorer
from hf_posswap.evaluation.statistics import LEAST_DOCUMENTS, ratio_interval
from hf_posswap.utils.result_views import ResultView


@dataclass(frozen=True, repr=False)
class GainScore(ResultView):
    """The gain from `context` tokens.

    Attributes:
        context: number of tokens before the scored ones.
        loss: mean loss of the scored tokens, in nats.
        gain: loss with the reference context minus this loss; positive if the longer context helps.
        low: lower end of the gain's 95 % interval over documents, or None.
        high: upper end of the interval.
        reference: whether this is the reference context, whose gain is 0.
    """

    context: int
    loss: float
    gain: float
    low: float | None
    high: float | None
    reference: bool


def contexts_of(window: int, length: int, tail: int | None = None) -> tuple[list[int], int]:
    """Return the contexts to try in ascending order, doubling from 1/8 of the reference up to `length` - T, and T.

    Args:
        window: the original window in tokens; the reference context is window - T.
        length: tokens of each document.
        tail: T; None: 1024, or half the window if that is less.

    Raises:
        DataError: T leaves no context in the window, or the documents are shorter than the window.

    Example:
        >>> contexts_of(4096, 16384)
        ([384, 768, 1536, 3072, 6144, 12288, 15360], 1024)
    """
    tail = min(1024, window // 2) if tail is None else tail
    if not 1 <= tail < window <= length:
        raise DataError(f"ctx_gain needs 1 <= tail < window <= length, got tail {tail}, window {window}, {length}.")
    reference = window - tail
    contexts = {reference, length - tail}
    contexts |= {c for power in range(-3, 30) if 1 <= (c := int(reference * 2.0**power)) <= length - tail}
    return sorted(contexts), tail


def context_losses(scorer: Scorer, document: np.ndarray, contexts: Sequence[int], tail: int) -> np.ndarray:
    """Return the summed loss of the last `tail` tokens of `document` with each context, float64 [C], in nats.

    Args:
        scorer: the model's scorer.
        document: token ids [L].
        contexts: tokens before the scored ones, each read from position 0.
        tail: T, tokens scored.

    Raises:
        DataError: the document is too short for a context.
        NumericError, PositionRangeError: as `Scorer.nll`.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2)).eval()
        >>> context_losses(Scorer(model), np.ones(12, int), [1, 4], tail=4).shape
        (2,)
    """
    if not contexts or min(contexts) < 1 or max(contexts) + tail > len(document):
        raise DataError(f"contexts {list(contexts)} and a tail of {tail} do not fit {len(document)} tokens.")
    ids = torch.from_numpy(document.astype(np.int64))[None]
    sums = [scorer.nll(ids[:, -context - tail :], scored=tail).double().sum().item() for context in contexts]
    return np.array(sums)


def context_gain(
    losses: np.ndarray, contexts: Sequence[int], tail: int, reference: int, *, seed: int = 0
) -> list[GainScore]:
    """Return the gain of each context from the results of `context_losses` for each document.

    Args:
        losses: [N, C], in nats.
        contexts: the contexts of the columns.
        tail: T, the number of scored tokens.
        reference: the context that the others are compared with, one of `contexts`.
        seed: random seed of the bootstrap.

    Raises:
        DataError: the reference is not one of the contexts, or the shapes differ.

    Example:
        >>> [score.gain for score in context_gain(np.array([[8.0, 6.0], [4.0, 2.0]]), [1, 2], 4, reference=1)]
        [0.0, 0.5]
    """
    if losses.ndim != 2 or losses.shape[1] != len(contexts) or reference not in contexts:
        raise DataError(f"losses {losses.shape} of contexts {list(contexts)} do not hold the reference {reference}.")
    counts = np.full(len(losses), tail)
    reference_losses = losses[:, list(contexts).index(reference)]
    scores = []
    for context, column in zip(contexts, losses.T, strict=True):
        low, high = ratio_interval(reference_losses - column, counts, seed=seed) or (None, None)
        gain = float((reference_losses - column).sum() / counts.sum())
        loss = float(column.sum() / counts.sum())
        scores.append(GainScore(context, loss, gain, low, high, context == reference))
    return scores


@dataclass(frozen=True, repr=False)
class FarContext(ResultView):
    """Whether text beyond the original window helps a model.

    Attributes:
        context: the largest number of tokens before the scored ones.
        further: number of these tokens that do not fit the original window.
        tail: number of scored tokens.
        gain: the gain from these further tokens, in nats per token of the tail; positive if they help.
        low: lower end of its 95 % interval over documents, or None.
        high: upper end of the interval.
        verdict: "helps" (low > 0), "harms" (high < 0), "undecided", or "no verdict".
        reason: why there is no verdict, or None.
    """

    context: int
    further: int
    tail: int
    gain: float
    low: float | None
    high: float | None
    verdict: str
    reason: str | None


def far_context(scores: Sequence[GainScore], tail: int, documents: int) -> FarContext | None:
    """Return whether the longest context helps or harms compared with a full original window.

    Returns None if no context exceeds the original window.

    Args:
        scores: from `context_gain`, including the reference.
        tail: T, the number of scored tokens.
        documents: number of documents; with fewer than 8 there is no verdict.

    Raises:
        DataError: no score is the reference.

    Example:
        >>> scores = context_gain(np.array([[8.0, 6.0], [4.0, 2.0]] * 4), [1, 2], 4, reference=1)
        >>> far = far_context(scores, 4, documents=8)
        >>> far.further, far.gain, far.verdict
        (1, 0.5, 'helps')
    """
    reference = next((score.context for score in scores if score.reference), None)
    if reference is None:
        raise DataError(f"none of the contexts {[score.context for score in scores]} is the reference.")
    last = max(scores, key=lambda score: score.context)
    if last.context == reference:
        return None
    reason = None
    if documents < LEAST_DOCUMENTS:
        reason = f"{documents} documents are too few for a verdict; {LEAST_DOCUMENTS} are needed."
    elif last.low is None or last.high is None:
        reason = "too many documents have the same gain for an interval."
    if reason or last.low is None or last.high is None:
        verdict = "no verdict"
    else:
        verdict = "helps" if last.low > 0 else "harms" if last.high < 0 else "undecided"
    return FarContext(
        last.context,
        last.context - reference,
        tail,
        last.gain,
        last.low,
        last.high,
        verdict,
        reason,
    )
