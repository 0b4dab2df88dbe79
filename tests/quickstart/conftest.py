"""A quickstart small enough to run whole in seconds: the same code, a model of a few thousand weights."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from hf_posswap.quickstart import BaseSettings, QuickstartResult, QuickstartSettings
from hf_posswap.quickstart.run import run
from hf_posswap.utils.progress import Reporter

TINY = QuickstartSettings(
    steps=3,
    step_tokens=64,
    documents=4,
    stream_tokens=20_000,
    passkey_trials=1,
    continuation=8,
    base=BaseSettings(window=16, width=16, layers=2, heads=2, steps=3, batch=2),
)


@pytest.fixture(scope="session")
def tiny() -> QuickstartSettings:
    return TINY


@pytest.fixture
def console() -> Console:
    """A console without a terminal; what it got is in `console.file.getvalue()`."""
    return Console(file=io.StringIO(), width=120)


@pytest.fixture
def reporter(console: Console) -> Reporter:
    return Reporter(console)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> QuickstartResult:
    """One whole tiny quickstart, shared by the tests that only read it."""
    out = tmp_path_factory.mktemp("quickstart") / "out"
    return run(out, TINY, cache=cache, console=Console(file=io.StringIO(), width=120))
