"""Runs every test that asks for a `pair` on all of them, the toys registered meanwhile.

Of the daily pairs each run has one quarter for each point (`tests/conftest.py`), by a hash: in four days each pair
meets every point.

Pairs whose code others share, and those of `others.py`, run only with `-m exhaustive`; the light contract proves
them in every run of the slow tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.contract.pairs import FEW, KINDS, Pair, all_pairs, daily_pairs, is_daily, refusal
from tests.toys.registration import registered


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    asked = [name for name in ("pair", "refused") if name in metafunc.fixturenames]
    for name in asked:
        wanted: list[Callable[[Pair], bool]] = [is_refused_once if name == "refused" else is_supported]
        wanted += [marker.args[0] for marker in metafunc.definition.iter_markers("pairs")]
        slow = metafunc.definition.get_closest_marker("slow") is not None  # then one model of each kind is enough
        few = metafunc.definition.get_closest_marker("few") is not None
        daily = is_of_a_kind if slow else is_one_of_few if few else is_daily
        metafunc.parametrize(name, _marked(wanted, daily, metafunc.config), indirect=True)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what one parameter, that is marked `few`, makes of the pairs that are none of these."""
    for item in items:
        pair = getattr(item, "callspec", None) and item.callspec.params.get("pair")  # type: ignore[attr-defined]
        few = item.get_closest_marker("few") and not item.get_closest_marker("slow")
        if isinstance(pair, Pair) and few and not is_one_of_few(pair):
            item.add_marker(pytest.mark.exhaustive)


def is_one_of_few(pair: Pair) -> bool:
    """Return whether the pair runs a point in every run that asks the same of all schemes which ask for positions."""
    return is_daily(pair) and pair.scheme in FEW


def is_of_a_kind(pair: Pair) -> bool:
    """Return whether the pair is of a model that stands for its kind."""
    return pair.model in KINDS


def is_supported(pair: Pair) -> bool:
    """Return whether the pair can be patched."""
    return refusal(pair) is None


def is_refused_once(pair: Pair) -> bool:
    """Return whether the pair is refused, and stands for its model."""
    return refusal(pair) is not None and pair.first


def _marked(wanted: list[Callable[[Pair], bool]], daily: Callable[[Pair], bool], config: pytest.Config) -> list[Any]:
    """Return the pairs as parameters, those that do not run in every run marked: or left out, where -m says so.

    To plan all swaps, to make twenty thousand tests and to deselect them takes longer than some hundreds of them.
    """
    if "not exhaustive" in config.getoption("markexpr"):
        pairs = [pair for pair in daily_pairs() if daily(pair) and all(accepts(pair) for accepts in wanted)]
        if not pairs:  # a test without parameters would be skipped, and say so
            return [pytest.param(daily_pairs()[0], marks=pytest.mark.exhaustive, id="no daily pair")]
    else:
        pairs = [pair for pair in all_pairs() if all(accepts(pair) for accepts in wanted)]
    return [pytest.param(pair, marks=[] if daily(pair) else pytest.mark.exhaustive, id=str(pair)) for pair in pairs]


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Return a pair that can be patched."""
    with registered():
        yield request.param


@pytest.fixture
def refused(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Return a pair that cannot be patched."""
    with registered():
        yield request.param
