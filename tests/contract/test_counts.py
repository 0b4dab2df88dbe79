"""The contract runs on as many cases as on the last release of transformers: no point skips itself."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hf_posswap.schemes import SCHEMES, schemes_for
from hf_posswap.testing.contract import outside
from hf_posswap.testing.contract.cases import all_checks
from hf_posswap.testing.contract.point import checks_of, point_of
from tests.contract.counts import KINDS, LIGHT, by_kind, count, count_light, lost, points, row_for, rows
from tests.contract.models import TINY
from tests.contract.others import ALL, OTHERS
from tests.contract.paired import PAIRED
from tests.contract.pairs import all_pairs, daily_pairs, daily_schemes, is_daily, supported_pairs, words
from tests.stock import RELEASE, cache_in, takes_cache
from tests.toys.registration import TOY_MODEL, TOY_SCHEME, registered

PLANNED = outside.the_scheme_is_planned_or_refused_with_a_reason.__name__
REWRITE = "If these cases are gone for a reason, python -m tests.contract.counts --write, and commit counts.json."


@pytest.mark.slow
def test_no_point_runs_on_fewer_cases_than_before() -> None:
    gone = lost(count(), {point: n for point, n in row_for(RELEASE).items() if point != LIGHT})
    assert not gone, f"{gone}. {REWRITE}"


def test_every_scheme_and_every_model_is_here() -> None:
    pairs = {(pair.model, pair.scheme) for pair in all_pairs()}
    full = {(model, scheme) for model in TINY for scheme in [*schemes_for("text"), TOY_SCHEME]}
    with registered():
        assert pairs == full | {(model, scheme) for model in (*OTHERS, *PAIRED) for scheme in daily_schemes(model)}
    assert len(ALL) == len(TINY) + len(OTHERS) + len(PAIRED)
    assert TOY_MODEL in TINY
    assert TOY_SCHEME not in SCHEMES


def test_daily_pairs_are_those_of_every_pair_that_are_daily() -> None:
    """They are found without a plan of any other."""
    assert daily_pairs() == [pair for pair in all_pairs() if is_daily(pair)]


def test_no_release_has_fewer_cases_than_the_one_before_it() -> None:
    for (_, before), (release, after) in pairwise(rows().items()):
        assert not lost(after, before), release


def test_every_kind_of_point_is_counted() -> None:
    for release, row in rows().items():
        kinds = by_kind(row)
        assert kinds.keys() == {*KINDS, "all"}
        assert all(n >= 100 for n in kinds.values()), (release, kinds)


def test_every_point_has_its_row() -> None:
    """A new point without one would not be missed."""
    assert {point for point, *_ in points()} <= row_for(RELEASE).keys(), REWRITE


def test_every_point_of_the_package_is_a_test_here() -> None:
    """What `pytest --posswap-contract` asks of other packages, this one keeps; the rest of it has tests of its own."""
    asked = {f"test_{check.__name__}" for check in all_checks() if not point_of(check).refused}
    here = {point.partition(".")[2].partition("[")[0] for point, *_ in points()}
    assert asked - here == {f"test_{name}" for name in checks_of(outside)} - {"test_" + PLANNED}


def test_a_point_that_runs_on_no_pair_is_found() -> None:
    before = {"a": 3, "b": 2, "c": 1}
    assert lost({"a": 3, "b": 1, "d": 9}, before) == {"b": "1 of 2", "c": "0 of 1"}


def test_a_class_that_takes_a_cache_by_its_signature_gives_one() -> None:
    """And one that does not, gives none: `pair.cached` asks the signature."""
    found = {True: 0, False: 0}
    models = {pair.model: pair for pair in supported_pairs() if pair.causal and pair.first}
    for name, pair in models.items():
        takes = takes_cache(ALL[name].stock)
        asked = {"use_cache": True} if takes else {}
        out = ALL[name].build()(**pair.given(input_ids=words(2, 8)), **asked)
        assert (cache_in(out) is not None) == takes, name
        found[takes] += 1
    assert found[True] >= 40
    assert found[False] == 1  # the first GPT


@pytest.mark.slow
def test_no_fewer_classes_take_a_cache_than_before() -> None:
    gone = lost(count_light(), {LIGHT: row_for(RELEASE)[LIGHT]})
    assert not gone, f"{gone}. {REWRITE}"
