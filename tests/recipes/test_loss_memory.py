"""The measurement of the loss in chunks runs as its user runs it, and finds what it is for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.bench import loss_memory

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux keeps a high-water mark")


@pytest.mark.slow
def test_chunks_need_less_memory_for_the_same_loss(tmp_path: Path) -> None:
    sizes = ["--tokens", "2048", "--vocabulary", "32000", "--width", "64", "--chunk", "128"]
    command = [sys.executable, loss_memory.__file__, *sizes, "--out", str(tmp_path / "found.json")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["chunks"]["loss"] == pytest.approx(found["whole"]["loss"], rel=1e-5)
    assert found["ratio"] < 0.6
    logits = 2048 * 32000 * 4 / 2**20
    assert found["whole"]["peak_mib"] - found["chunks"]["peak_mib"] > logits
    assert f"{found['ratio']:.2f} of the whole loss's" in run.stdout


def test_the_committed_result_keeps_the_promise() -> None:
    path = Path(loss_memory.__file__).parent / "results" / "loss_memory.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["sizes"]["tokens"] == 16_384
    assert found["ratio"] <= 0.6
    assert found["ratio"] == pytest.approx(found["chunks"]["peak_mib"] / found["whole"]["peak_mib"], abs=1e-3)
