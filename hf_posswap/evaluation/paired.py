"""Paired statistics of two models on the same documents and questions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_posswap.errors import DataError
from hf_posswap.evaluation.statistics import LEAST_DOCUMENTS, spread_of
from hf_posswap.utils.result_views import ResultView

_EXACT_DOCUMENTS = 12  # up to 4096 sign patterns are enumerated
_CHUNK = 1000


@dataclass(frozen=True, repr=False)
class Change(ResultView):
    """The change between two models on the same tokens.

    Attributes:
        documents: number of documents.
        difference: mean loss after minus before, in nats per token; negative is better.
        low: lower end of the 95 % interval over documents, see `ratio_interval`, or None.
        high: upper end of the interval.
        p: two-sided p-value, the larger of the sign-flip test's and the interval's; None with too few documents.
        no_verdict: why there is no verdict, or None.
    """

    documents: int
    difference: float
    low: float | None
    high: float | None
    p: float | None
    no_verdict: str | None


@dataclass(frozen=True, repr=False)
class NonInferiority(ResultView):
    """Whether a model is not worse than another by more than a margin.

    Attributes:
        documents: number of documents.
        difference: mean loss after minus before, in nats per token.
        upper: upper end of its 95 % interval, a one-sided bound of 97.5 %, or None.
        lower: lower end of its 95 % interval, or None.
        margin: the tolerated difference.
        verdict: "not worse" (upper <= margin), "worse" (lower > margin), "undecided", or "no verdict".
        reason: why there is no verdict, or None.
    """

    documents: int
    difference: float
    upper: float | None
    lower: float | None
    margin: float
    verdict: str
    reason: str | None


def paired_change(
    before: np.ndarray, after: np.ndarray, counts: np.ndarray, *, draws: int = 2000, seed: int = 0
) -> Change:
    """Return the change of the mean loss from `before` to `after`, its interval and its p-value.

    Args:
        before: summed loss of each document, in nats, [N].
        after: summed loss of the same tokens under the second model, [N].
        counts: number of tokens of each document, [N].
        draws: number of bootstrap samples, and of sign patterns if they are sampled.
        seed: random seed of both.

    Raises:
        DataError: there are no documents, or the shapes differ.

    Example:
        >>> change = paired_change(np.arange(10.0), np.arange(10.0) + 1, np.full(10, 2))
        >>> change.difference, change.low, change.high, change.p
        (0.5, 0.5, 0.5, 0.001953125)
    """
    before, after = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if before.shape != after.shape:
        raise DataError(f"before and after must be of the same documents, got shapes {before.shape}, {after.shape}.")
    differences = after - before  # [N]
    spread = spread_of(differences, counts, draws=draws, seed=seed)
    low, high = (spread.interval() if spread else None) or (None, None)
    few = _too_few(len(differences))
    p = None if few or not spread else max(spread.p(), sign_flip_p(differences, draws=draws, seed=seed))
    return Change(len(differences), float(differences.sum() / np.sum(counts)), low, high, p, few)


def sign_flip_p(differences: np.ndarray, *, draws: int = 2000, seed: int = 0) -> float:
    """Return the two-sided p-value of a sum of paired differences under random signs.

    Under the null hypothesis each document's difference is as likely as its opposite. p is the share of sign patterns
    whose sum is at least as far from zero as the observed one: of all patterns for up to 12 documents, otherwise of
    `draws` random patterns and the observed one.

    Args:
        differences: difference of each document, [N].
        draws: number of random patterns.
        seed: their random seed.

    Raises:
        DataError: there are no differences.

    Example:
        >>> sign_flip_p(np.array([1.0, 1.0, 1.0]))
        0.25
    """
    differences = np.asarray(differences, dtype=np.float64)
    if differences.ndim != 1 or len(differences) == 0:
        raise DataError(f"a sign-flip test needs one difference per document, got shape {differences.shape}.")
    seen = abs(differences.sum()) * (1 - 1e-12)  # tolerates rounding differences between orders of summation
    if len(differences) <= _EXACT_DOCUMENTS:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(differences))))  # [2^N, N]
        return float((np.abs(signs @ differences) >= seen).mean())
    random, far = np.random.default_rng(seed), 0
    for start in range(0, draws, _CHUNK):
        signs = random.integers(0, 2, (min(_CHUNK, draws - start), len(differences))) * 2.0 - 1
        far += int((np.abs(signs @ differences) >= seen).sum())
    return (1 + far) / (1 + draws)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values with Holm's step-down correction, in the given order. It does not assume independence.

    The k-th smallest of m is multiplied by m - k + 1 and is at least as large as the one before it. Holm 1979,
    https://www.jstor.org/stable/4615733.

    Raises:
        DataError: a value is not a probability.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    if any(not 0 <= p <= 1 for p in p_values):
        raise DataError(f"p-values lie between 0 and 1, got {list(p_values)}.")
    adjusted = [0.0] * len(p_values)
    least = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = least
    return adjusted


def holm_corrected(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `rows` with "p_holm": corrected over the rows that have a "p", and None for the others.

    Example:
        >>> [row["p_holm"] for row in holm_corrected([{"p": 0.01}, {"p": None}, {"p": 0.04}])]
        [0.02, None, 0.04]
    """
    adjusted = iter(holm([row["p"] for row in rows if row["p"] is not None]))
    return [row | {"p_holm": None if row["p"] is None else next(adjusted)} for row in rows]


def mcnemar_p(before: Sequence[bool], after: Sequence[bool]) -> float:
    """Return the exact two-sided p-value of McNemar's test that two models answer questions equally well.

    Only the n questions that exactly one model answers correctly count; under the null hypothesis each is a fair coin
    toss. McNemar 1947, https://doi.org/10.1007/BF02295996.

    Args:
        before: whether the first model answers each question correctly.
        after: whether the second model does.

    Raises:
        DataError: the numbers of questions differ.

    Example:
        >>> mcnemar_p([True, False, False, False, False, False], [True, True, True, True, True, True])
        0.0625
    """
    if len(before) != len(after):
        raise DataError(f"McNemar's test pairs the same questions, got {len(before)} and {len(after)} answers.")
    gained = sum(bool(new) and not old for old, new in zip(before, after, strict=True))
    lost = sum(bool(old) and not new for old, new in zip(before, after, strict=True))
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**n)


def non_inferiority(
    before: np.ndarray,
    after: np.ndarray,
    counts: np.ndarray,
    *,
    margin: float = 0.02,
    draws: int = 2000,
    seed: int = 0,
) -> NonInferiority:
    """Return whether `after` is not worse than `before` by more than `margin` nats per token.

    The verdict is "not worse" if the upper end of the 95 % interval of the mean difference is at most the margin. This
    one-sided bound of 97.5 %, usual for such trials, keeps false "not worse" verdicts at the margin to about 5 %, even
    for skewed documents. There is no verdict with fewer than 8 documents or without an interval.

    Args:
        before: summed loss of each document, in nats, [N].
        after: summed loss of the same tokens under the second model, [N].
        counts: number of tokens of each document, [N].
        margin: tolerated difference in nats per token.
        draws: number of bootstrap samples.
        seed: their random seed.

    Raises:
        DataError: there are no documents, the shapes differ, or the margin is negative.

    Example:
        >>> losses, counts = np.arange(8.0), np.full(8, 100)
        >>> non_inferiority(losses, losses + 1, counts).verdict, non_inferiority(losses, losses + 3, counts).verdict
        ('not worse', 'worse')
    """
    if not margin >= 0:
        raise DataError(f"margin is a number of nats, at least 0, got {margin}.")
    change = paired_change(before, after, counts, draws=draws, seed=seed)
    lower, upper, reason = change.low, change.high, change.no_verdict
    if reason is None and (lower is None or upper is None):
        reason = "too many documents have the same difference for an interval."
    if reason or lower is None or upper is None:
        verdict = "no verdict"
    else:
        verdict = "not worse" if upper <= margin else "worse" if lower > margin else "undecided"
    return NonInferiority(change.documents, change.difference, upper, lower, margin, verdict, reason)


def _too_few(documents: int) -> str | None:
    if documents >= LEAST_DOCUMENTS:
        return None
    return f"{documents} documents are too few for a verdict; {LEAST_DOCUMENTS} are needed."
