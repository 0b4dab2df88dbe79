"""Tells of each failure as it happens, since a run on a lent GPU may be cut off: pytest -p tests.gpu.told."""

from __future__ import annotations

import sys

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        reasons = [line[4:] for line in report.longreprtext.splitlines() if line.startswith("E   ")]
        sys.stdout.write(f"\nFAILED {report.nodeid}: {' | '.join(reasons)[:600]}\n")
        sys.stdout.flush()
