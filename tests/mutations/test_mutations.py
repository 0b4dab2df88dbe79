"""A next transformers, made today: no swap may go wrong in it without an error.

Each row changes the installed library in a process of its own, before anything of it is used, and asks every swap that
the change reaches for numbers that today's library knows: `python -m tests.mutations` prints the table of all rows.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mutations.cases import CASES
from tests.mutations.mutations import MUTATIONS
from tests.mutations.running import Outcome
from tests.stock import RELEASE

DAILY = {
    "the cache of an attention is renamed",
    "the mask of an attention is renamed",
    "functions of modeling files have other names",
}
"""Mutations of every run; the others are slow, 15 minutes together, of which `.ci/run` has an eighth each day."""
pytestmark = pytest.mark.skipif(
    RELEASE < (5, 23), reason="the changes are written for the modeling files of 5.23 and on"
)
HERE = Path(__file__).resolve().parents[2]


class Library:
    """The installed library, which is changed for one question at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.mutations", "--serve"]
        self.process = subprocess.Popen(command, cwd=HERE, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.known: dict[tuple[str, str], list[Outcome]] = {}

    def run(self, mutation: str, plant: str = "") -> list[Outcome]:
        """Return what becomes of all swaps that `mutation` reaches, with a mistake called `plant` in hf_posswap."""
        if (mutation, plant) not in self.known:
            self.known[mutation, plant] = self._ask(mutation, plant)
        return self.known[mutation, plant]

    def _ask(self, mutation: str, plant: str) -> list[Outcome]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([mutation, plant]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the process that changes the library ended: its standard error says why"
        return [Outcome(**one) for one in json.loads(answer)]


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    library = Library()
    yield library
    library.process.communicate()


def of(outcomes: list[Outcome], verdict: str) -> list[str]:
    return [f"{one.case} {one.scheme}: {one.detail}" for one in outcomes if one.verdict == verdict]


def _rows() -> list[Any]:
    return [pytest.param(name, marks=() if name in DAILY else pytest.mark.slow) for name in MUTATIONS]


@pytest.mark.parametrize("name", _rows())
def test_no_swap_goes_wrong_without_an_error(library: Library, name: str) -> None:
    mutation, outcomes = MUTATIONS[name], library.run(name)
    assert of(outcomes, "broken") == [], "the mutation itself makes stock models wrong"
    assert of(outcomes, "silent") == []
    assert of(outcomes, "crash") == []
    assert len(outcomes) >= mutation.fewest, "the mutation finds nothing to change any more"
    assert len(of(outcomes, "survives")) >= mutation.survivors


def test_the_table_is_long_enough() -> None:
    assert len(MUTATIONS) >= 40
    assert all({"rope", "alibi"} <= {scheme for scheme, _ in case.schemes} for case in CASES.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["the cache of an attention is renamed", "the cache is renamed everywhere, deprecated"]
)
def test_a_cache_that_is_found_by_its_name_is_noticed(library: Library, name: str) -> None:
    outcomes, planted = library.run(name), library.run(name, "a cache is found by its name")
    assert len(of(outcomes, "survives")) >= MUTATIONS[name].survivors > len(of(planted, "survives"))
