"""A save that is killed with SIGKILL, at random moments and at each of its steps, leaves the old or the new."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Tally = Callable[[str, int, int], None]


def killed_saves(root: Path, trials: int, way: str) -> list[dict[str, Any]]:
    child = Path(__file__).with_name("saves_child.py")
    command = [sys.executable, str(child), str(root), str(trials), way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["beside"] == ["checkpoint", "reference-0", "reference-1"]  # nothing is left of the killed
    found: list[dict[str, Any]] = report["found"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trials", "way"),
    [
        (3, "exchange"),
        (3, "aside"),
        pytest.param(20, "exchange", marks=pytest.mark.slow),
        pytest.param(20, "aside", marks=pytest.mark.slow),
    ],
)
def test_a_killed_save_leaves_the_old_checkpoint_or_the_new(
    tmp_path: Path, tally: Tally, trials: int, way: str
) -> None:
    found = killed_saves(tmp_path, trials, way)
    killed = [trial for trial in found if trial["killed"]]
    tally("kill of a save", len(killed), sum(trial["left"] in ("old", "new") for trial in killed))
    assert {trial["left"] for trial in found} == {"old", "new"}
    stepwise = [trial for trial in found if not trial["random"]]
    assert sum(trial["killed"] for trial in stepwise) >= 4  # before and after each step that the save takes
    assert {trial["left"] for trial in stepwise if trial["killed"]} == {"old", "new"}
    if trials == 20:
        assert sum(trial["killed"] for trial in found if trial["random"]) >= 5
