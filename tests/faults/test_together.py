"""Threads and processes that write one place at once: each ends with a whole, and the last one stays."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hf_posswap
from hf_posswap.utils import atomic_io
from hf_posswap.utils.atomic_io import replacing, writable_folder

pytestmark = pytest.mark.slow

Tally = Callable[[str, int, int], None]
CHILD = Path(__file__).with_name("faults_child.py")


def at_once(acts: list[Callable[[], object]]) -> list[BaseException]:
    """Run `acts` in threads that begin together, and return what they raised."""
    start, raised = threading.Barrier(len(acts)), []

    def run(act: Callable[[], object]) -> None:
        start.wait()
        try:
            act()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("rounds", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_threads_that_replace_one_folder_leave_one_of_theirs_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally, rounds: int, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(atomic_io, "_exchange", lambda one, other: False)
    target = tmp_path / "model"

    def write(mark: str) -> None:
        with replacing(target) as temporary:
            temporary.mkdir()
            for number in range(5):
                (temporary / f"{number}").write_text(mark)

    for number in range(rounds):
        marks = [f"{number} {thread}" for thread in range(4)]
        assert at_once([lambda mark=mark: write(mark) for mark in marks]) == []  # type: ignore[misc]
        found = {path.read_text() for path in target.iterdir()}
        assert len(found) == 1
        assert found <= set(marks)
        assert len(list(target.iterdir())) == 5
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
    tally("threads in one folder", 4 * rounds, 4 * rounds)


def test_threads_that_save_to_one_folder_leave_a_checkpoint_that_loads(tmp_path: Path, tally: Tally) -> None:
    models: list[Any] = []
    for seed, scheme in enumerate(("rope", "alibi", "kerple")):
        torch.manual_seed(seed)
        models.append(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=16)))
        hf_posswap.patch_model(models[-1], scheme, max_length=32)
    target = tmp_path / "model"
    for _ in range(4):
        acts = [lambda model=model: hf_posswap.save(model, target, overwrite=True) for model in models]
        assert at_once(acts) == []  # type: ignore[arg-type]
        loaded: Any = hf_posswap.load(target)
        saved = next(model for model in models if model.config.posswap == loaded.config.posswap)
        assert all(torch.equal(value, saved.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    tally("threads in one folder", 12, 12)


def test_a_sweep_takes_nothing_from_a_thread_that_writes(tmp_path: Path, tally: Tally) -> None:
    stop = threading.Event()

    def sweep() -> None:
        while not stop.is_set():
            writable_folder(tmp_path)

    def write() -> None:
        try:
            for number in range(40):
                with replacing(tmp_path / f"{number}") as temporary:
                    temporary.write_text("half")
                    with temporary.open("a") as file:
                        file.write(" whole")
        finally:
            stop.set()

    assert at_once([sweep, write]) == []
    assert {path.read_text() for path in tmp_path.iterdir()} == {"half whole"}
    assert len(list(tmp_path.iterdir())) == 40
    tally("threads in one folder", 40, 40)


def begin(name: str, folder: Path, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(CHILD), name, str(folder), str(seed), "ready"]
    process = subprocess.Popen(
        command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def both(name: str, folder: Path) -> list[dict[str, Any]]:
    """Let two processes do `name` in `folder` at the same moment, and return their answers."""
    processes = [begin(name, folder, seed) for seed in (2, 3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    done = [process.communicate(timeout=200) for process in processes]
    assert all(out for out, _ in done), done
    return [json.loads(out.splitlines()[-1]) for out, _ in done]


@pytest.mark.parametrize("name", ["save", "text"])
def test_two_processes_that_write_one_place_both_succeed(tmp_path: Path, tally: Tally, name: str) -> None:
    assert all("value" in answer for answer in both(name, tmp_path))
    if name == "save":
        assert hf_posswap.load(tmp_path / "model").config.posswap["scheme"]["name"] in ("rope", "alibi")  # type: ignore[union-attr]
    else:
        assert (tmp_path / "a.txt").read_text() in ("2" * 20_000, "3" * 20_000)
    assert len(list(tmp_path.iterdir())) == 1
    tally("processes in one folder", 2, 2)


def test_two_comparisons_in_one_folder_are_one_and_a_refusal(tmp_path: Path, tally: Tally) -> None:
    done = both("compare", tmp_path)
    refused = [answer for answer in done if "error" in answer]
    assert len(refused) <= 1  # none where the other had ended before it began
    assert all("another process is writing to" in answer["message"] for answer in refused)
    tally("processes in one folder", 2, 2)
