"""Confidence intervals over documents, because tokens of one document are not independent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from hf_posswap.errors import DataError

LEAST_DOCUMENTS = 8
"""With fewer documents there is no verdict and no p-value."""

LEAST_FOR_INTERVAL = 5
"""With fewer documents there is no interval: too many resamples repeat one document for bootstrap-t quantiles."""

_DRAWN = 2**18  # scores drawn in one batch
_SAME = 1e-12  # residuals below this share of the largest score are rounding errors


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
        DataError: there are no documents, the shapes differ, or a document has no tokens.

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
