"""Intervals and tests against scipy, brute force, and how often they are right on data whose truth is known."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hf_posswap.errors import DataError
from hf_posswap.evaluation.paired import holm, mcnemar_p, non_inferiority, paired_change, sign_flip_p
from hf_posswap.evaluation.statistics import ratio_interval, wilson_interval


@given(st.integers(1, 200), st.floats(0, 1), st.sampled_from([0.9, 0.95, 0.99]))
def test_wilson_interval_equals_scipys(trials: int, share: float, level: float) -> None:
    successes = round(share * trials)
    theirs = stats.binomtest(successes, trials).proportion_ci(level, method="wilson")
    assert wilson_interval(successes, trials, level=level) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (3, 2), (-1, 2)])
def test_a_share_of_nothing_is_refused(successes: int, trials: int) -> None:
    with pytest.raises(DataError, match=f"got {successes} of {trials}"):
        wilson_interval(successes, trials)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_mcnemar_is_the_binomial_test_of_the_questions_that_changed(answers: list[tuple[bool, bool]]) -> None:
    before, after = zip(*answers, strict=True)
    gained = sum(new and not old for old, new in answers)
    changed = sum(new != old for old, new in answers)
    wanted = stats.binomtest(gained, changed, 0.5).pvalue if changed else 1.0
    assert mcnemar_p(before, after) == pytest.approx(wanted, rel=1e-9)
    assert mcnemar_p(after, before) == mcnemar_p(before, after)


def test_mcnemar_of_other_questions_is_refused() -> None:
    with pytest.raises(DataError, match="pairs the same questions, got 1 and 2 answers"):
        mcnemar_p([True], [True, False])


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_is_the_definition(p_values: list[float]) -> None:
    m, ordered = len(p_values), sorted(p_values)
    for p, adjusted in zip(p_values, holm(p_values), strict=True):
        rank = max(i for i, q in enumerate(ordered) if q == p)
        wanted = max(min(1.0, (m - j) * ordered[j]) for j in range(rank + 1))
        first = ordered.index(p)  # equal p-values: the smaller multiple is raised to the larger by the running maximum
        assert adjusted in (wanted, max(min(1.0, (m - j) * ordered[j]) for j in range(first + 1)))
        assert p <= adjusted <= 1


def test_holm_holds_the_error_of_the_whole_family() -> None:
    random = np.random.default_rng(0)
    wrong = sum(min(holm(random.uniform(size=6).tolist())) <= 0.05 for _ in range(2000))
    assert wrong / 2000 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)
    with pytest.raises(DataError, match="between 0 and 1"):
        holm([0.5, 1.2])


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=9))
def test_sign_flips_of_few_documents_are_all_tried(differences: list[int]) -> None:
    patterns = list(itertools.product((-1, 1), repeat=len(differences)))
    far = sum(
        abs(sum(s * d for s, d in zip(signs, differences, strict=True))) >= abs(sum(differences)) for signs in patterns
    )
    assert sign_flip_p(np.array(differences)) == pytest.approx(far / len(patterns))


def test_random_sign_flips_agree_with_scipys_permutation_test() -> None:
    differences = np.random.default_rng(3).normal(0.4, 1.0, 30)
    theirs = stats.permutation_test(
        (differences,), np.sum, permutation_type="samples", n_resamples=20_000, rng=np.random.default_rng(0)
    ).pvalue
    assert sign_flip_p(differences, draws=20_000) == pytest.approx(theirs, abs=0.01)
    with pytest.raises(DataError, match="one difference a document"):
        sign_flip_p(np.empty(0))


def test_the_change_is_the_mean_over_tokens_and_says_when_documents_are_few() -> None:
    random = np.random.default_rng(0)
    counts = random.integers(10, 90, 20)
    before, after = random.gamma(2.0, counts), random.gamma(2.0, counts)
    change = paired_change(before, after, counts)
    assert change.difference == pytest.approx(after.sum() / counts.sum() - before.sum() / counts.sum())
    assert change.low < change.difference < change.high
    few = paired_change(before[:7], after[:7], counts[:7])
    assert (few.p, few.no_verdict) == (None, "7 documents are too few for a verdict; 8 are needed.")
    with pytest.raises(DataError, match="of the same documents"):
        paired_change(before, after[:3], counts)


def test_non_inferiority_has_four_answers() -> None:
    random, counts = np.random.default_rng(0), np.full(40, 1000)
    before = random.gamma(2.0, 1000.0, 40)

    def verdict(shift: float, noise: float, documents: int = 40) -> str:
        after = before + counts * random.normal(shift, noise, 40)
        return non_inferiority(before[:documents], after[:documents], counts[:documents]).verdict

    assert verdict(0.0, 0.01) == "not worse"
    assert verdict(0.1, 0.01) == "worse"
    assert verdict(0.02, 0.05) == "undecided"
    assert verdict(0.0, 0.01, documents=5) == "no verdict"
    with pytest.raises(DataError, match="margin is a number of nats, at least 0, got -1"):
        non_inferiority(before, before, counts, margin=-1)


def documents(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return sums and counts of documents of uneven length whose mean loss a token is 2, whatever the length."""
    counts = random.integers(50, 2000, count)
    centres = random.gamma(16.0, 2.0 / 16.0, count)  # documents differ; tokens of one are alike
    return centres * counts + random.normal(0.0, 0.5, count) * np.sqrt(counts), counts


@pytest.mark.slow
@pytest.mark.parametrize(("count", "least"), [(8, 0.82), (16, 0.88), (48, 0.92), (200, 0.935)])
def test_intervals_hold_the_truth_as_often_as_documents_allow(count: int, least: float) -> None:
    random = np.random.default_rng(count)
    held = 0
    for trial in range(1500):
        low, high = ratio_interval(*documents(random, count), seed=trial)
        held += low <= 2.0 <= high
    assert least <= held / 1500 <= 0.965, held / 1500


@pytest.mark.slow
@pytest.mark.parametrize("count", [9, 30])
def test_the_sign_flip_test_is_wrong_as_seldom_as_it_says(count: int) -> None:
    random = np.random.default_rng(count)
    wrong = sum(sign_flip_p(random.standard_t(3, count), draws=500, seed=i) <= 0.05 for i in range(1500))
    assert 0.03 <= wrong / 1500 <= 0.065, wrong / 1500


@pytest.mark.slow
def test_a_model_at_the_margin_is_seldom_called_not_worse() -> None:
    random, wrong = np.random.default_rng(0), 0
    for trial in range(1500):
        sums, counts = documents(random, 40)
        after = sums + counts * random.normal(0.02, 0.05, 40)
        wrong += non_inferiority(sums, after, counts, seed=trial).verdict == "not worse"
    assert wrong / 1500 <= 0.08, wrong / 1500
