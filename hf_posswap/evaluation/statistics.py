"""Confidence intervals over documents, because tokens of one document are not independent; and paired tests.

Paired statistics compare two models on the same documents and questions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from hf_posswap.errors import DataError
from hf_posswap.utils.result_views import ResultView

LEAST_DOCUMENTS = 8
"""With fewer documents there is no verdict and no p-value."""

LEAST_FOR_INTERVAL = 5
"""With fewer documents there is no interval: too many resamples repeat one document for bootstrap-t quantiles."""

_DRAWN = 2**18  # scores drawn in one batch
_SAME = 1e-12  # residuals below this share of the largest score are rounding errors
_ROUNDING = 1e-5  # nats per token by which float32 losses of equal models may differ
_EXACT_DOCUMENTS = 12  # up to 4096 sign patterns are enumerated
_CHUNK = 1000


@dataclass(frozen=True)
class Spread:
    """The uncertainty of a mean over documents.

    Attributes:
        mean: sum of the scores divided by the sum of the counts.
        error: its standard error, 0 if all documents are equal.
        degrees: degrees of freedom, the number of documents minus one.
        studentized: for each bootstrap sample, (its mean - `mean`) / its standard error, sorted; infinite for a sample
            that repeats one document.
    """

    mean: float
    error: float
    degrees: int
    studentized: np.ndarray

    def interval(self, level: float = 0.95) -> tuple[float, float] | None:
        """Return the wider of Student's and the bootstrap-t interval at each end, or None without an interval.

        Student's interval is right for symmetric scores, but too short on the side of a long tail. The bootstrap-t is
        right there, but too short for heavy tails on both sides, and unstable with few documents. The wider of both
        covers all these cases (see the simulation in tests/evaluation/test_statistics.py).
        """
        if self.error == 0:
            return self.mean, self.mean
        far, tail = student_quantile((1 + level) / 2, self.degrees), (1 - level) / 2
        ends = np.quantile(self.studentized, [tail, 1 - tail], method="closest_observation")
        if not np.isfinite(ends).all():
            return None
        return self.mean - self.error * max(far, float(ends[1])), self.mean + self.error * max(far, float(-ends[0]))

    def p(self) -> float:
        """Return the two-sided p-value of a mean of 0: 1 minus the level at which the interval first contains 0."""
        if self.error == 0:
            return 1.0 if self.mean == 0 else 0.0
        seen = self.mean / self.error
        student = 2 * (1 - student_share(abs(seen), self.degrees))
        beyond = min(int((self.studentized >= seen).sum()), int((self.studentized <= seen).sum()))
        return min(1.0, max(student, 2 * (1 + beyond) / (1 + len(self.studentized))))


def spread_of(sums: np.ndarray, counts: np.ndarray, *, draws: int = 2000, seed: int = 0) -> Spread | None:
    """Return the uncertainty of sum(sums) / sum(counts) by resampling documents, or None for fewer than 5.

    It is the ratio estimator: sums and counts are resampled together, so long documents have the same weight in a
    sample as in the estimate. The standard error is that of the residuals s - R c. Bootstrap-t: Efron and Tibshirani
    1993, chapters 6 and 12.5.

    Args:
        sums: sum of each document, [N].
        counts: number of summands of each document, [N].
        draws: number of bootstrap samples.
        seed: their random seed.

    Raises:
        DataError: there are no documents, the shapes differ, a sum is not finite, or a document has no tokens.

    Example:
        >>> spread = spread_of(np.array([2.0, 4.0, 6.0, 8.0, 10.0]), np.full(5, 2))
        >>> spread.mean, round(spread.error, 4)
        (3.0, 0.7071)
    """
    sums, counts = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    if sums.shape != counts.shape or sums.ndim != 1 or len(sums) == 0 or counts.min() <= 0:
        raise DataError(
            f"expected one sum and one positive count per document, got shapes {sums.shape}, {counts.shape}."
        )
    if not (np.isfinite(sums).all() and np.isfinite(counts).all()):
        raise DataError(f"the sum of document {int(np.argmin(np.isfinite(sums)))} is not finite: take that model out.")
    order = np.lexsort((counts, sums))  # so that resamples do not depend on the order of the documents
    sums, counts = sums[order], counts[order]
    documents = len(sums)
    if documents < LEAST_FOR_INTERVAL:
        return None
    mean = float(sums.sum() / counts.sum())
    residuals = sums - mean * counts  # [N]
    if np.abs(residuals).max() <= _SAME * np.abs(sums).max():
        return Spread(mean, 0.0, documents - 1, np.zeros(1))
    error = _error(residuals, counts)
    random, studentized = np.random.default_rng(seed), np.empty(draws)
    batch_size = max(1, _DRAWN // documents)
    for first in range(0, draws, batch_size):
        drawn = random.integers(0, documents, (min(batch_size, draws - first), documents))
        sample_residuals, sample_counts = residuals[drawn], counts[drawn]  # [draws, N]
        sample_means = sample_residuals.sum(axis=1) / sample_counts.sum(axis=1)  # [draws]
        errors = _error(sample_residuals - sample_means[:, None] * sample_counts, sample_counts)
        repeated = errors <= _SAME * error
        studentized_means = np.where(
            repeated, np.copysign(np.inf, sample_means), sample_means / np.where(repeated, 1.0, errors)
        )
        studentized[first : first + batch_size] = studentized_means
    return Spread(mean, float(error), documents - 1, np.sort(studentized))


def _error(residuals: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the standard error of a ratio from its residuals, over the last axis."""
    documents = residuals.shape[-1]
    squares = np.square(residuals).sum(axis=-1) * documents / (documents - 1)
    return np.asarray(np.sqrt(squares) / counts.sum(axis=-1))


def ratio_interval(
    sums: np.ndarray, counts: np.ndarray, *, level: float = 0.95, draws: int = 2000, seed: int = 0
) -> tuple[float, float] | None:
    """Return the confidence interval of sum(sums) / sum(counts) over documents, or None.

    At each end it is the wider of Student's t and the bootstrap-t interval. There is none for fewer than 5 documents,
    or if so many documents have the same score that the bootstrap-t has no finite end.

    Args:
        sums: summed loss of each document, [N].
        counts: number of scored tokens of each document, [N].
        level: coverage of the interval.
        draws: number of bootstrap samples.
        seed: their random seed.

    Raises:
        DataError: there are no documents, the shapes differ, or a document has no tokens.

    Example:
        >>> low, high = ratio_interval(np.array([2.0, 4.0, 6.0, 8.0, 10.0]), np.full(5, 2))
        >>> low <= 3.0 - 2.776 * 0.7071 and high >= 3.0 + 2.776 * 0.7071
        True
        >>> ratio_interval(np.array([2.0, 4.0, 6.0, 8.0]), np.full(4, 2)) is None
        True
    """
    spread = spread_of(sums, counts, draws=draws, seed=seed)
    return None if spread is None else spread.interval(level)


def student_share(value: float, degrees: int) -> float:
    """Return the CDF of Student's t-distribution at `value`, by Abramowitz and Stegun, 26.7.3 and 26.7.4.

    Example:
        >>> round(student_share(2.3646, 7), 4), student_share(0.0, 4)
        (0.975, 0.5)
    """
    angle = math.atan2(value, math.sqrt(degrees))
    cosine = math.cos(angle) ** 2
    odd = degrees % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for k in range(degrees // 2):
        total += term
        term *= cosine * (2 * k + 1 + odd) / (2 * k + 2 + odd)
    inside = math.sin(angle) * total
    return 0.5 + (angle + inside) / math.pi if odd else 0.5 + inside / 2


def student_quantile(share: float, degrees: int) -> float:
    """Return the quantile of Student's t-distribution at `share`, by bisection.

    Example:
        >>> round(student_quantile(0.975, 7), 4), round(student_quantile(0.95, 40), 4)
        (2.3646, 1.6839)
    """
    low, high = 0.0, 1.0
    if share < 0.5:
        return -student_quantile(1 - share, degrees)
    while student_share(high, degrees) < share:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_share(middle, degrees) < share else (low, middle)
    return (low + high) / 2


def wilson_interval(successes: int, trials: int, *, level: float = 0.95) -> tuple[float, float]:
    """Return Wilson's score interval of a share, which stays inside [0, 1] and is valid at 0 and 1.

    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n); Wilson 1927, https://doi.org/10.2307/2276774.

    Args:
        successes: number of successes.
        trials: number of trials.
        level: coverage of the interval.

    Raises:
        DataError: there are no trials, or more successes than trials.

    Example:
        >>> tuple(round(bound, 4) for bound in wilson_interval(10, 10))
        (0.7225, 1.0)
    """
    if not 0 <= successes <= trials or trials < 1:
        raise DataError(f"a share needs at least 1 trial and at most as many successes, got {successes} of {trials}.")
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, ratio = successes / trials, z * z / trials
    middle = (share + ratio / 2) / (1 + ratio)
    half = z * math.sqrt(share * (1 - share) / trials + ratio / (4 * trials)) / (1 + ratio)
    return max(0.0, middle - half), min(1.0, middle + half)


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

    The p-value is 1 where no document differs by more than the rounding of float32 losses.

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
    few = None
    if len(differences) < LEAST_DOCUMENTS:
        few = f"{len(differences)} documents are too few for a verdict; {LEAST_DOCUMENTS} are needed."
    p = None if few or not spread else max(spread.p(), sign_flip_p(differences, draws=draws, seed=seed))
    if p is not None and np.abs(differences / counts).max() <= _ROUNDING:
        p = 1.0
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
    differences = np.sort(differences)  # so that random signs do not depend on the order of the documents
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


def holm_corrected(rows: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
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
    one-sided bound of 97.5 %, usual for such trials, keeps false "not worse" verdicts at the margin to about 5 %, also
    for skewed documents. Where a change breaks one document in many, a few documents seldom hold it: use 50 or more
    (see the simulation in tests/evaluation/test_statistics.py). There is no verdict with fewer than 8 documents or
    without an interval.

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
