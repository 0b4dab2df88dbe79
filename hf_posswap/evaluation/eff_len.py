"""The effective length of a model. Metric `eff_len`, NoLiMa's criterion relative to the model's own base accuracy.

The effective length is the largest L such that at every L' from the base length to L the Wilson lower bound of the
accuracy is at least 0.85 of the accuracy at the base length. Modarressi et al. 2025, section 4,
https://arxiv.org/abs/2502.05167.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_posswap.errors import DataError
from hf_posswap.evaluation.statistics import wilson_interval
from hf_posswap.utils.result_views import ResultView

RULER_BAR = 0.856
"""RULER's threshold: the score of Llama-2-7B at 4096 tokens. Hsieh et al. 2024, https://arxiv.org/abs/2404.06654."""


@dataclass(frozen=True, repr=False)
class EffectiveLength(ResultView):
    """The length up to which a model keeps its base accuracy.

    Attributes:
        length: effective length in tokens, at least the base length; None without a verdict.
        base: accuracy at the base length.
        bar: threshold for the lower bound.
        no_verdict: why there is no verdict, or None.
    """

    length: int | None
    base: float
    bar: float
    no_verdict: str | None


def effective_length(
    answers: Mapping[int, tuple[int, int]], *, share: float = 0.85, base_length: int | None = None
) -> EffectiveLength:
    """Return the effective length.

    Args:
        answers: {length: (right answers, trials)}, pooled over depths.
        share: required share of the base accuracy.
        base_length: the length of the base accuracy; None: the shortest.

    Raises:
        DataError: there are no lengths, or the base length is not one of them.

    Example:
        >>> effective_length({256: (50, 50), 512: (49, 50), 1024: (20, 50)}).length
        512
        >>> effective_length({256: (10, 10)}).no_verdict
        '10 questions per length cannot show 85 % of 100 %: ask at least 22.'
    """
    base_length = min(answers, default=0) if base_length is None else base_length
    if base_length not in answers:
        raise DataError(f"the effective length needs answers at the base length {base_length}, got {sorted(answers)}.")
    right, trials = answers[base_length]
    wilson_interval(right, trials)  # raises for invalid counts
    base = right / trials
    bar = share * base
    if right == 0:
        return EffectiveLength(None, base, bar, f"no answer was right at the base length of {base_length} tokens.")
    fewest = min(trials for length, (_, trials) in answers.items() if length >= base_length)
    if wilson_interval(fewest, fewest)[0] < bar:
        needed = next(n for n in range(fewest, 10**6) if wilson_interval(n, n)[0] >= bar)
        reason = f"{fewest} questions per length cannot show {share:.0%} of {base:.0%}: ask at least {needed}."
        return EffectiveLength(None, base, bar, reason.replace("%", " %"))
    bounds = {length: wilson_interval(*counts)[0] for length, counts in answers.items() if length > base_length}
    longest = longest_passing(bounds, bar) or base_length
    return EffectiveLength(longest, base, bar, None)


def longest_passing(scores: Mapping[int, float], bar: float) -> int | None:
    """Return the longest length at which, as at all shorter ones, the score is at least `bar`; None if there is none.

    Example:
        >>> longest_passing({4096: 0.96, 8192: 0.87, 16384: 0.6, 32768: 0.9}, RULER_BAR)
        8192
    """
    longest = None
    for length in sorted(scores):
        if scores[length] < bar:
            break
        longest = length
    return longest
