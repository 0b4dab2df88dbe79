"""Runs every test that asks for a `pair` on all of them, the toys registered meanwhile.

Pairs whose code others share run only with `-m whole`; the light contract proves them in every run of the slow tests.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.pairs import Pair, all_pairs, is_daily, refusal, supported_pairs
from tests.toys.registration import registered


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pair" in metafunc.fixturenames:
        wanted = metafunc.definition.get_closest_marker("pairs")
        pairs = [pair for pair in supported_pairs() if wanted is None or wanted.args[0](pair)]
        marked = [pytest.param(pair, marks=[] if is_daily(pair) else pytest.mark.whole) for pair in pairs]
        metafunc.parametrize("pair", marked, ids=[str(pair) for pair in pairs], indirect=True)
    if "refused" in metafunc.fixturenames:
        pairs = [pair for pair in all_pairs() if refusal(pair) is not None]
        metafunc.parametrize("refused", pairs, ids=str, indirect=True)


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
