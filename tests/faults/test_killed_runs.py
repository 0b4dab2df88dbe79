"""A comparison that is killed with SIGKILL goes on where it was, and ends with the same bytes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Tally = Callable[[str, int, int], None]
CHILD = Path(__file__).with_name("faults_child.py")
WRITTEN = ("results.json", "table.md", "curves.csv", "needle.csv", "report.html")


def begin(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(CHILD), "compare", str(folder), "0", "ready"]
    dated = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}  # the date is in the results, and no other difference
    process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dated)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdin.write("\n")
    process.stdin.flush()
    return process


def finish(folder: Path) -> dict[str, Any]:
    answer = json.loads(begin(folder).communicate(timeout=200)[0].splitlines()[-1])
    return dict(answer["value"])


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_comparison_ends_with_the_same_bytes(tmp_path: Path, tally: Tally, kills: int) -> None:
    began = time.monotonic()
    alone = finish(tmp_path / "a")
    lasts = time.monotonic() - began
    moments, killed, kept = random.Random(0), 0, 0
    for _ in range(kills):
        process = begin(tmp_path / "b")
        time.sleep(moments.uniform(0.0, lasts / 8))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        lines = tmp_path / "b" / "out" / "per_doc.jsonl"
        held = lines.read_bytes().count(b"\n") if lines.exists() else 0
        assert held >= kept  # nothing that was kept is lost
        kept = held
    resumed = finish(tmp_path / "b")
    assert resumed["computed"] == alone["computed"] - kept
    for name in WRITTEN:
        assert (tmp_path / "b" / "out" / name).read_bytes() == (tmp_path / "a" / "out" / name).read_bytes(), name
    assert not list((tmp_path / "b").rglob(".posswap-partial-*"))
    tally("kill of a comparison", killed, killed)
