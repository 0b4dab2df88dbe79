"""Counts of faults that were injected and survived, for the summary at the end of the tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Callable[[str, int, int], None]:
    """Return what counts faults: of which kind, how many were injected, how many were survived."""

    def count(kind: str, injected: int, survived: int) -> None:
        request.node.user_properties.append(("faults", (kind, injected, survived)))

    return count
