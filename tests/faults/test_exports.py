"""Exports on a full disk, killed while they write, two at once, and where nothing but ASCII is expected."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

import hf_posswap
from hf_posswap.cli.outcome import Code
from tests.contract.models import build
from tests.faults.test_disks import within

pytestmark = pytest.mark.slow

Tally = Callable[[str, int, int], None]
ROOT = Path(__file__).parents[2]
OUTS = {"vllm": "out", "llamacpp": "out.gguf", "torch": "out.pt2", "onnx": "out.onnx"}
WIDE = {"hidden_size": 512, "intermediate_size": 2048}  # some MB of weights, which take a moment


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = hf_posswap.patch_model(build("llama", **WIDE), "p_rope", max_length=64)
    return hf_posswap.save(model, tmp_path_factory.mktemp("faults") / "checkpoint")


def command(source: Path, target: str, out: Path) -> list[str]:
    return [sys.executable, "-m", "hf_posswap", "export", str(source), "--target", target, "-o", str(out)]


def started(source: Path, target: str, out: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(source, target, out),
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(run: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = run.communicate(timeout=280)
    return run.returncode, said


def is_whole(out: Path, source: Path) -> bool:
    """Return whether what was exported can be read, to its last weight."""
    if out.suffix == ".gguf":
        return bool(gguf.GGUFReader(out).tensors[-1].data.size)
    if out.suffix == ".pt2":
        return isinstance(torch.export.load(out), torch.export.ExportedProgram)
    held: Any = hf_posswap.load(out).state_dict()
    return all(torch.equal(held[name], weight) for name, weight in hf_posswap.load(source).state_dict().items())


@pytest.mark.parametrize("target", list(OUTS))
def test_a_full_disk_leaves_nothing(target: str, checkpoint: Path, tmp_path: Path, tally: Tally) -> None:
    typed = " ".join(command(checkpoint, target, tmp_path / OUTS[target]))
    lines = within(
        tmp_path, "1m", f"cd {ROOT}", f"{{ PYTHONPATH={ROOT} {typed} 2>&1; echo ended $?; }}", f"ls -A {tmp_path}"
    )
    said = " ".join(lines)
    assert "error: cannot" in said
    assert "No space left on device" in said or "MiB are free" in said or "requested and" in said
    assert lines[-1] == f"ended {Code.FILES:d}"  # and the folder is empty
    tally("full disk", 1, 1)


@pytest.mark.parametrize(("target", "trials"), [("vllm", 4), ("llamacpp", 4), ("torch", 1)])
def test_a_killed_export_leaves_all_or_nothing(
    target: str, trials: int, checkpoint: Path, tmp_path: Path, tally: Tally
) -> None:
    out, killed = tmp_path / OUTS[target], 0
    for trial in range(trials):
        run = started(checkpoint, target, out)
        while run.poll() is None and not list(tmp_path.glob(".posswap-partial-*/new/*")):
            time.sleep(0.001)
        time.sleep(0.01 * trial)
        run.send_signal(signal.SIGKILL)
        killed += ended(run)[0] == -signal.SIGKILL
        assert not out.exists() or is_whole(out, checkpoint)
        if out.exists():
            break
    if not out.exists():
        assert ended(started(checkpoint, target, out))[0] == 0
    assert is_whole(out, checkpoint)
    assert killed
    assert sorted(path.name for path in tmp_path.iterdir()) == [OUTS[target]]
    tally("kill of an export", killed, killed)


@pytest.mark.parametrize("target", ["vllm", "llamacpp"])
def test_two_at_once_leave_one_whole(target: str, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / OUTS[target]
    codes = [ended(run)[0] for run in [started(checkpoint, target, out) for _ in range(2)]]
    assert 0 in codes
    assert set(codes) <= {0, Code.FILES}  # the second may find the place taken
    assert is_whole(out, checkpoint)
    assert [path.name for path in tmp_path.iterdir()] == [OUTS[target]]


@pytest.mark.parametrize("target", ["vllm", "llamacpp"])
def test_names_beyond_ascii_are_taken_in_any_locale(target: str, checkpoint: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "Größe 数字", tmp_path / f"für {OUTS[target]}"
    hf_posswap.load(checkpoint).save_pretrained(source)
    plain = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code, said = ended(started(source, target, out, **plain))
    assert code == 0, said
    assert is_whole(out, checkpoint)
    if target == "llamacpp":
        assert gguf.GGUFReader(out).fields["general.name"].contents() == source.name
