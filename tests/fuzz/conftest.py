"""What the search for files that break a reader needs around it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

MORE = 4 * 2**30
"""Bytes that a test may take beside what its process has."""
SIZE = Path("/proc/self/statm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of this folder last: their audit hook stays (`hostile.py`)."""
    items.sort(key=lambda item: item.nodeid.startswith("tests/fuzz/"))


@pytest.fixture(autouse=True)
def _no_deprecated_calls() -> None:
    """Let a hostile config ask transformers for what is deprecated."""


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have pytest keep no compiled module of what a reader imports late: to make its folder is a change outside."""
    monkeypatch.setattr("sys.dont_write_bytecode", True)


@pytest.fixture(autouse=True)
def _bounded_memory() -> Iterator[None]:
    """Give a file that asks for the memory of the machine an error, and not the machine."""
    if not SIZE.exists():
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(SIZE.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
