"""Verdicts on published claims: an interval, and whether it lies where the claim predicts.

Claims about schemes are claims about trainings, so the unit is the training: Student's interval over seeds, of
differences between trainings of the same seed. If documents were read too, the distances to each end over seeds and
over documents add in squares, as independent errors do (Zou and Donner 2008, https://doi.org/10.1002/sim.3095): few
seeds can agree by chance, and so can few documents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hf_posswap.errors import DataError
from hf_posswap.evaluation import paired_change

Verdict = Literal["holds", "does not hold", "not decided here"]
HOLDS: Verdict = "holds"
FAILS: Verdict = "does not hold"
OPEN: Verdict = "not decided here"
_STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""The 97.5 % quantile of Student's t with 1, 2, ... degrees of freedom."""


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class Region:
    """The open interval of estimates for which a claim is true.

    Example:
        >>> Region(high=0.0).verdict(Interval(-0.2, -0.3, -0.1)), Region(low=0.9).verdict(Interval(0.9, 0.8, 1.0))
        ('holds', 'not decided here')
    """

    low: float = -math.inf
    high: float = math.inf

    def verdict(self, interval: Interval) -> Verdict:
        """Return the verdict by whether all of the interval lies in the region, none of it, or some."""
        if self.low < interval.low and interval.high < self.high:
            return HOLDS
        return FAILS if interval.high <= self.low or interval.low >= self.high else OPEN

    def __contains__(self, value: float) -> bool:
        return self.low < value < self.high

    def __str__(self) -> str:
        if math.isinf(self.low):
            return f"below {self.high:g}"
        return f"above {self.low:g}" if math.isinf(self.high) else f"between {self.low:g} and {self.high:g}"


def over_seeds(values: Sequence[float]) -> Interval:
    """Return the mean of one value per seed and its Student's 95 % interval.

    Raises:
        DataError: fewer than 2 seeds, or more than 10.

    Example:
        >>> over_seeds([1.0, 1.0, 1.0])
        Interval(estimate=1.0, low=1.0, high=1.0)
    """
    if not 2 <= len(values) <= len(_STUDENT) + 1:
        raise DataError(f"an interval over trainings takes 2 to {len(_STUDENT) + 1} seeds, got {len(values)}.")
    mean = float(np.mean(values))
    half = _STUDENT[len(values) - 2] * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def over_both(before: np.ndarray, after: np.ndarray) -> Interval:
    """Return `after` less `before` with an interval for other seeds and other documents.

    Args:
        before: means of documents, [seeds, N].
        after: of the same tokens and seeds, [seeds, N].

    Raises:
        DataError: shapes that differ, too few or too many seeds, or documents over which no interval holds.
    """
    if before.shape != after.shape:
        raise DataError(f"pairs are of the same seeds and documents, got shapes {before.shape} and {after.shape}.")
    seeds = over_seeds((after - before).mean(axis=1))
    texts = paired_change(before.mean(axis=0), after.mean(axis=0), np.ones(before.shape[1]))
    if texts.low is None or texts.high is None:
        raise DataError(f"no interval holds over these {before.shape[1]} documents; take more of them.")
    mean = seeds.estimate
    low = mean - math.hypot(mean - seeds.low, texts.difference - texts.low)
    return Interval(mean, low, mean + math.hypot(seeds.high - mean, texts.high - texts.difference))


def joined(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict on a claim of several parts: it holds if all hold, and fails if one fails.

    Example:
        >>> joined([HOLDS, OPEN]), joined([OPEN, FAILS])
        ('not decided here', 'does not hold')
    """
    if FAILS in verdicts:
        return FAILS
    return HOLDS if verdicts and set(verdicts) == {HOLDS} else OPEN


def judged(region: Region, interval: Interval, elsewhere: float | None = None, unfit: str = "") -> dict[str, Any]:
    """Return a part of a claim as JSON: the interval, the region, the verdict, and why there is none.

    Args:
        region: predicted by the claim.
        interval: the interval at the study's learning rate.
        elsewhere: the estimate at another rate, if measured: a verdict must not depend on the rate.
        unfit: why these trainings are inconclusive, such as a task that was not learned; "": they are conclusive.
    """
    verdict, reason = region.verdict(interval), unfit
    if not reason and verdict != OPEN and elsewhere is not None and (elsewhere in region) != (verdict == HOLDS):
        reason = "the other learning rate says otherwise"
    return {
        "estimate": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "asked": str(region),
        "other rate": elsewhere,
        "verdict": OPEN if reason else verdict,
        "why": reason,
    }
