"""Browsers for the tests of the page, closed when a test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chromium import start_chromium

Chromium = Callable[[str], Any]


@pytest.fixture
def chromium(tmp_path: Path) -> Iterator[Chromium]:
    """Return what starts a Chromium: see `start_chromium`."""
    started: list[Any] = []

    def start(kind: str = "desktop") -> Any:
        started.append(start_chromium(kind, tmp_path / f"profile{len(started)}"))
        return started[-1]

    yield start
    for chrome in started:
        chrome.quit()
