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

from tests.contract.models import TINY
from tests.contract.pairs import FEW, KINDS, Pair, all_pairs, is_daily, refusal, supported_pairs
from tests.toys.registration import registered


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pair" in metafunc.fixturenames:
        wanted = [marker.args[0] for marker in metafunc.definition.iter_markers("pairs")]
        pairs = [pair for pair in supported_pairs() if all(accepts(pair) for accepts in wanted)]
        slow = metafunc.definition.get_closest_marker("slow") is not None  # then one model of each kind is enough
        few = metafunc.definition.get_closest_marker("few") is not None
        daily = is_of_a_kind if slow else is_one_of_few if few else is_daily
        metafunc.parametrize("pair", _marked(pairs, daily, metafunc.config), indirect=True)
    if "refused" in metafunc.fixturenames:
        pairs = [pair for pair in all_pairs() if refusal(pair) is not None and pair.first]
        metafunc.parametrize("refused", _marked(pairs, lambda pair: pair.model in TINY, metafunc.config), indirect=True)


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


def _marked(pairs: list[Pair], daily: Callable[[Pair], bool], config: pytest.Config) -> list[Any]:
    """Return the pairs as parameters, those that do not run in every run marked: or left out, where -m says so.

    To make twenty thousand tests and to deselect them takes longer than a hundred of them.
    """
    if "not exhaustive" in config.getoption("markexpr"):
        pairs = [pair for pair in pairs if daily(pair)] or pairs[:1]
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
