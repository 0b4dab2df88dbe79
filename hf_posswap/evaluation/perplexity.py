"""Perplexity by length and loss by position, of whole documents, from full-context forward passes.

Protocol `ppl_prefix`: of documents with at least L_max tokens, the first L tokens are read, and each token is predicted
from all before it: exp(sum of losses / number of tokens). The tokens are the same for every model. The first token of a
document has no context and is not scored.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hf_posswap.evaluation.statistics import ratio_interval
from hf_posswap.utils.result_views import ResultView


@dataclass(frozen=True, repr=False)
class LengthScore(ResultView):
    """Perplexity at one length.

    Attributes:
        length: number of tokens read of each document.
        perplexity: exp of the mean loss over all scored tokens.
        low: lower end of the 95 % interval over documents, or None.
        high: upper end of the interval.
        documents: number of documents.
        tokens: number of scored tokens.
    """

    length: int
    perplexity: float
    low: float | None
    high: float | None
    documents: int
    tokens: int


@dataclass(frozen=True, repr=False)
class PositionScore(ResultView):
    """Mean loss of the tokens at some positions.

    Attributes:
        start: first position, counted from 0.
        stop: position after the last.
        loss: mean loss, in nats per token.
        low: lower end of the 95 % interval over documents, or None.
        high: upper end of the interval.
    """

    start: int
    stop: int
    loss: float
    low: float | None
    high: float | None


def perplexity_by_length(losses: Mapping[int, np.ndarray], *, seed: int = 0) -> list[LengthScore]:
    """Return `ppl_prefix` by length from the results of `measure_losses`.

    Args:
        losses: {L: [N, L - 1]}.
        seed: random seed of the bootstrap.

    Example:
        >>> score = perplexity_by_length({3: np.full((4, 2), np.log(5.0))})[0]
        >>> round(score.perplexity, 6), score.tokens
        (5.0, 8)
    """
    scores = []
    for length, nll in sorted(losses.items()):
        sums = nll.sum(axis=1, dtype=np.float64)  # [N]
        counts = np.full(len(nll), nll.shape[1])
        low, high = _perplexities(ratio_interval(sums, counts, seed=seed))
        mean = float(sums.sum() / counts.sum())
        scores.append(LengthScore(length, math.exp(mean), low, high, len(nll), int(counts.sum())))
    return scores


def _perplexities(interval: tuple[float, float] | None) -> tuple[float, float] | tuple[None, None]:
    """Convert an interval of losses to perplexities; (None, None) if an end overflows a float."""
    if interval is None or interval[1] > math.log(sys.float_info.max):
        return None, None
    return math.exp(interval[0]), math.exp(interval[1])


def change_with_length(losses: Mapping[int, np.ndarray], *, seed: int = 0) -> tuple[float, float | None, float | None]:
    """Return the ratio of the perplexities at the longest and the shortest length, and its 95 % interval.

    The interval is paired: both lengths use the same bootstrap sample of documents, which cancels the differences
    between documents.

    Args:
        losses: {L: [N, L - 1]}, at least one length.
        seed: random seed of the bootstrap.

    Example:
        >>> change_with_length({3: np.full((5, 2), 1.0), 5: np.full((5, 4), 1.0)})
        (1.0, 1.0, 1.0)
    """
    short, long = losses[min(losses)], losses[max(losses)]
    differences = long.mean(axis=1, dtype=np.float64) - short.mean(axis=1, dtype=np.float64)  # [N]
    low, high = _perplexities(ratio_interval(differences, np.ones(len(differences)), seed=seed))
    return math.exp(float(differences.mean())), low, high


def loss_by_position(losses: np.ndarray, *, first: int = 1, seed: int = 0) -> list[PositionScore]:
    """Return the mean loss of the tokens at positions [2^k, 2^(k+1)), for every complete bucket.

    Args:
        losses: losses at one length, [N, L - 1]; column t - 1 is the token at position t.
        first: position of the token of the first column; of an encoder, the number of special tokens before a text.
        seed: random seed of the bootstrap.

    Example:
        >>> [(score.start, score.stop) for score in loss_by_position(np.ones((2, 7)))]
        [(1, 2), (2, 4), (4, 8)]
    """
    scores = []
    start = 1 << max(0, first - 1).bit_length()  # the first power of two that is at least `first`
    while 2 * start <= losses.shape[1] + first:
        bucket = losses[:, start - first : 2 * start - first]
        sums = bucket.sum(axis=1, dtype=np.float64)
        counts = np.full(len(bucket), bucket.shape[1])
        low, high = ratio_interval(sums, counts, seed=seed) or (None, None)
        scores.append(PositionScore(start, 2 * start, float(sums.sum() / counts.sum()), low, high))
        start *= 2
    return scores
