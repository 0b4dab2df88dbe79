"""Intervals and tests against scipy, brute force, and how often they are right on data whose truth is known.

`python -m tests.evaluation.test_statistics` prints the tables of .docs/pages/evaluation.md (half a minute).
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import hf_posswap
from hf_posswap.checkpoints.load import EXAMPLE
from hf_posswap.errors import DataError
from hf_posswap.evaluation import measure_losses
from hf_posswap.evaluation.statistics import (
    LEAST_DOCUMENTS,
    holm,
    mcnemar_p,
    non_inferiority,
    paired_change,
    ratio_interval,
    sign_flip_p,
    spread_of,
    student_quantile,
    student_share,
    wilson_interval,
)
from hf_posswap.text.stdlib import python_corpus
from hf_posswap.text.tokens import load_tokenizer


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
    with pytest.raises(DataError, match="one difference per document"):
        sign_flip_p(np.empty(0))


@given(st.floats(-40, 40), st.integers(1, 300), st.floats(0.001, 0.999))
def test_student_s_distribution_equals_scipys(value: float, degrees: int, share: float) -> None:
    assert student_share(value, degrees) == pytest.approx(stats.t.cdf(value, degrees), abs=1e-12)
    assert student_quantile(share, degrees) == pytest.approx(stats.t.ppf(share, degrees), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("documents", [9, 14, 30])
def test_an_interval_is_the_farther_of_students_and_the_bootstrap_t(documents: int) -> None:
    scores = np.random.default_rng(documents).exponential(1.0, documents)
    mean, error = scores.mean(), stats.sem(scores)

    samples = np.random.default_rng(1).choice(scores, (20_000, documents))
    drawn = stats.ttest_1samp(samples, mean, axis=1).statistic
    low, high = np.quantile(drawn, [0.025, 0.975], method="closest_observation")
    student = stats.t.interval(0.95, documents - 1, mean, error)
    wanted = min(student[0], mean - high * error), max(student[1], mean - low * error)
    assert ratio_interval(scores, np.ones(documents), draws=20_000) == pytest.approx(wanted, abs=0.15 * error)


def test_an_interval_of_uneven_documents_has_the_error_of_a_ratio() -> None:
    random = np.random.default_rng(0)
    sums, counts = documents(random, 40)
    spread = spread_of(sums, counts)
    assert spread is not None
    assert spread.mean == pytest.approx(sums.sum() / counts.sum())
    leaving_one = (sums.sum() - sums) / (counts.sum() - counts)
    jackknife = math.sqrt(39 / 40 * np.square(leaving_one - leaving_one.mean()).sum())
    assert spread.error == pytest.approx(jackknife, rel=0.1)


def test_there_is_no_interval_where_none_holds() -> None:
    assert ratio_interval(np.arange(4.0), np.ones(4)) is None
    assert ratio_interval(np.arange(5.0), np.ones(5)) is not None
    one_differs = np.array([0.0] * 7 + [0.125])  # a third of all samples are of zeros alone
    assert ratio_interval(one_differs, np.ones(8)) is None
    found = non_inferiority(np.zeros(8), one_differs, np.ones(8))
    assert (found.verdict, found.upper) == ("no verdict", None)
    assert found.reason == "too many documents have the same difference for an interval."
    assert ratio_interval(np.full(8, 0.1) * 3, np.full(8, 3.0)) == pytest.approx((0.1, 0.1))


@given(st.lists(st.floats(-2, 3), min_size=8, max_size=30, unique=True))
def test_a_p_value_never_says_more_than_the_interval(scores: list[float]) -> None:
    change = paired_change(np.zeros(len(scores)), np.array(scores), np.ones(len(scores)))
    assert change.p is not None
    if change.low is not None and change.high is not None and change.low < 0 < change.high:
        assert change.p > 0.049
    assert change.p >= sign_flip_p(np.array(scores)) - 1e-12


@pytest.mark.parametrize("count", [9, 16])
def test_the_order_of_documents_changes_nothing(count: int) -> None:
    """Resamples were drawn by place: the interval of the same documents could or could not hold 0."""
    random = np.random.default_rng(3)
    after, counts = random.exponential(1.0, count), np.arange(count) + 100
    orders = np.arange(count), np.arange(count)[::-1], random.permutation(count)
    changes = [paired_change(np.zeros(count), (after * counts)[order], counts[order]) for order in orders]
    assert len({(change.low, change.high, change.p) for change in changes}) == 1


def test_rounding_is_no_significant_difference() -> None:
    before, counts = np.arange(9.0) * 100 + 200, np.full(9, 100)
    assert paired_change(before, before + 1e-7 * counts, counts).p == 1.0
    assert paired_change(before, before + 1e-4 * counts, counts).p == pytest.approx(2 / 2**9)


def test_a_loss_that_is_not_finite_is_refused() -> None:
    with pytest.raises(DataError, match="the sum of document 2 is not finite"):
        paired_change(np.zeros(9), np.array([1.0, 2.0, np.nan, *range(6)]), np.ones(9))


def test_the_change_is_the_mean_over_tokens_and_says_when_documents_are_few() -> None:
    random = np.random.default_rng(0)
    counts = random.integers(10, 90, 20)
    before, after = random.gamma(2.0, counts), random.gamma(2.0, counts)
    change = paired_change(before, after, counts)
    assert change.difference == pytest.approx(after.sum() / counts.sum() - before.sum() / counts.sum())
    assert change.low is not None
    assert change.high is not None
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


Population = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def alike(draw: Callable[[np.random.Generator, int], np.ndarray], mean: float) -> Population:
    """Return documents of one token each, whose mean is 0."""
    return lambda random, count: (draw(random, count) - mean, np.ones(count))


def one_in_ten_breaks(random: np.random.Generator, count: int) -> np.ndarray:
    return random.normal(0.0, 1.0, count) + 5.0 * (random.random(count) < 0.1)


def uneven(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    sums, counts = documents(random, count)
    return sums - 2.0 * counts, counts


@functools.cache
def real_differences() -> np.ndarray:
    """Return what a swap of the packaged model changes in the mean loss of 128 tokens, of each of 256 Python files."""
    tokenizer, model = load_tokenizer(EXAMPLE, instead=""), hf_posswap.load(EXAMPLE).eval()
    texts = itertools.islice((document.text for document in python_corpus().train if len(document.text) > 2000), 256)
    ids = torch.tensor([tokenizer(text[:4000], verbose=False)["input_ids"][:128] for text in texts])
    before = measure_losses(model, ids.numpy(), [128], one_pass=True)[128].mean(axis=1)
    swapped = hf_posswap.patch_model(model, "alibi", max_length=256)
    return measure_losses(swapped, ids.numpy(), [128], one_pass=True)[128].mean(axis=1) - before


def real(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    held = real_differences().astype(np.float64)
    return random.choice(held, count) - held.mean(), np.ones(count)


COUNTS, TRIALS = (5, 8, 16, 50), 1500
"""The numbers of documents, and the simulated sets for each, in the tables of the page on evaluation."""
TITLES = {
    "normal": "normal",
    "real": "real: ALiBi in the packaged model, 256 Python files",
    "uneven": "documents of uneven length, weighted by tokens",
    "t3": "Student's t with 3 degrees of freedom",
    "gamma": "gamma, skewness 1.4",
    "exponential": "exponential, skewness 2",
    "one in ten breaks": "one document in ten breaks",
    "lognormal": "lognormal, skewness 6",
}
POPULATIONS: dict[str, Population] = {
    "normal": alike(lambda random, count: random.normal(0.0, 1.0, count), 0.0),
    "real": real,
    "uneven": uneven,
    "t3": alike(lambda random, count: random.standard_t(3, count), 0.0),
    "gamma": alike(lambda random, count: random.gamma(2.0, 1.0, count), 2.0),
    "exponential": alike(lambda random, count: random.exponential(1.0, count), 1.0),
    "one in ten breaks": alike(one_in_ten_breaks, 0.5),
    "lognormal": alike(lambda random, count: random.lognormal(0.0, 1.0, count), math.exp(0.5)),
}


def how_often(population: Population, count: int, trials: int) -> tuple[float, float, float]:
    """Return how often the 95 % interval holds the truth, and is false of either one-sided claim: too low, too high."""
    random = np.random.default_rng(count)
    below = above = given = 0
    for trial in range(trials):
        interval = ratio_interval(*population(random, count), draws=1000, seed=trial)
        if interval is None:  # the same real document drawn three times of five
            continue
        given += 1
        below += interval[1] < 0.0
        above += interval[0] > 0.0
    assert given >= 0.99 * trials
    return 1 - (below + above) / given, below / given, above / given


def percentile_holds(population: Population, count: int, trials: int) -> float:
    """Return how often the percentile bootstrap's nominal 95 % interval holds the truth."""
    random, held = np.random.default_rng(count), 0
    for _ in range(trials):
        sums, counts = population(random, count)
        drawn = random.integers(0, count, (1000, count))
        low, high = np.quantile(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1), [0.025, 0.975])
        held += low <= 0.0 <= high
    return held / trials


def rows() -> list[str]:
    """Return the rows of the page's table, in percent, and those of the percentile bootstrap."""
    found = []
    for name, population in POPULATIONS.items():
        held = [how_often(population, count, TRIALS) for count in COUNTS]
        found.append(f"| {TITLES[name]} | {' | '.join(f'{100 * h:.1f} ({100 * below:.1f})' for h, below, _ in held)} |")
    for name in ("normal", "real", "exponential"):
        shares = [100 * percentile_holds(POPULATIONS[name], count, TRIALS) for count in COUNTS]
        found.append(f"| percentile bootstrap, {name} | {' | '.join(f'{share:.1f}' for share in shares)} |")
    return found


@pytest.mark.slow
def test_the_page_on_evaluation_shows_what_the_simulation_finds() -> None:
    page = (Path(__file__).parents[2] / ".docs/pages/evaluation.md").read_text(encoding="utf-8")
    lines = page.splitlines()
    for row in rows():
        title = row.split(" | ")[0] + " |"
        (shown,) = (line for line in lines if line.startswith(title))
        numbers = [[float(number) for number in re.findall(r"\d+\.\d", one[len(title) :])] for one in (row, shown)]
        assert numbers[1] == pytest.approx(numbers[0], abs=1.0), title  # numpy and torch may round otherwise


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("name", "least"),
    [
        *((name, 0.95) for name in ("normal", "real", "uneven", "t3")),
        ("gamma", 0.94),
        ("exponential", 0.92),
        ("one in ten breaks", 0.91),
        ("lognormal", 0.90),
    ],
)
def test_intervals_hold_the_truth_as_often_as_they_say(name: str, least: float, count: int) -> None:
    trials = 800
    held, below, _ = how_often(POPULATIONS[name], count, trials)
    noise = 2 * math.sqrt(least * (1 - least) / trials)
    assert held >= least - noise, held
    if least >= 0.92 and count >= LEAST_DOCUMENTS:  # "not worse" at the margin
        assert below <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / trials), below


@pytest.mark.slow
def test_an_interval_of_many_documents_is_the_normal_one() -> None:
    scores = np.random.default_rng(0).normal(0.0, 1.0, 2000)
    interval = ratio_interval(scores, np.ones(2000))
    theirs = stats.norm.interval(0.95, scores.mean(), stats.sem(scores))
    assert interval == pytest.approx(theirs, abs=0.15 * stats.sem(scores))


@pytest.mark.slow
@pytest.mark.parametrize("count", [9, 30])
def test_the_sign_flip_test_is_wrong_as_seldom_as_it_says(count: int) -> None:
    random = np.random.default_rng(count)
    wrong = sum(sign_flip_p(random.standard_t(3, count), draws=500, seed=i) <= 0.05 for i in range(1500))
    assert 0.03 <= wrong / 1500 <= 0.065, wrong / 1500


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, 40])
@pytest.mark.parametrize("name", ["normal", "exponential"])
def test_a_model_at_the_margin_is_seldom_called_not_worse(name: str, count: int) -> None:
    random, wrong = np.random.default_rng(0), 0
    for trial in range(1000):
        change, _ = POPULATIONS[name](random, count)
        before, counts = random.gamma(16.0, 100.0, count), np.full(count, 500.0)
        found = non_inferiority(before, before + counts * (0.02 + 0.05 * change), counts, draws=1000, seed=trial)
        wrong += found.verdict == "not worse"
    assert wrong / 1000 <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 1000), wrong / 1000


if __name__ == "__main__":
    sys.stdout.write("\n".join(rows()) + "\n")
