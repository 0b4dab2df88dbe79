"""Several processes of one launch measure what one process does, keep it each in a file, and fail together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hf_posswap
from hf_posswap.comparison import is_main_process
from hf_posswap.comparison.ranks import Ranks, open_ranks
from hf_posswap.errors import CheckpointError, MissingDependencyError
from hf_posswap.evaluation.store import RunStore
from hf_posswap.training import byte_tokenizer
from tests import forked

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "recipes" / "compare.py"
METRICS = "ppl_prefix,nll_pos,ctx_gain,short_reg,passkey,offset_probe,ppl_compat"
FILES = ("results.json", "curves.csv", "needle.csv", "table.md")


@pytest.fixture(autouse=True)
def one_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results hold when they were made: here always at the same time, so that runs can be compared byte by byte."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model and nine texts."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=257, n_embd=8, n_layer=1, n_head=2, n_positions=128, bos_token_id=256, eos_token_id=256
    )
    folder = tmp_path_factory.mktemp("ranks")
    hf_posswap.save(GPT2LMHeadModel(config), folder / "tiny", tokenizer=byte_tokenizer())
    (folder / "text").mkdir()
    for number in range(9):
        (folder / "text" / f"{number}.txt").write_text(f"text {number} {number**2} " * 40)
    return folder


ON_CPUS = {"ACCELERATE_USE_CPU": "true"}


def arguments(folder: Path, out: str) -> list[str]:
    """Return the recipe's, for results in `out`."""
    given = [folder / "tiny", folder / out, "rope", "--text", folder / "text", "--lengths", "128,256"]
    return [*map(str, given), "--metrics", METRICS]


def torchrun(folder: Path, out: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the recipe by torchrun in two processes."""
    program = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={forked.free_port()}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **ON_CPUS}
    return subprocess.run(
        [sys.executable, *program, str(SCRIPT), *arguments(folder, out), *more], cwd=ROOT, env=environment,
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def alone(folder: Path, out: str) -> None:
    """Run the recipe in one process."""
    process = forked.start(lambda: forked.run_script(SCRIPT, *arguments(folder, out)))
    process.join()
    assert process.exitcode == 0


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


@pytest.mark.slow
def test_two_processes_share_the_units_and_find_the_same_bytes(folder: Path) -> None:
    alone(folder, "one")
    done = torchrun(folder, "two")
    assert done.returncode == 0, done.stderr
    for name in FILES:
        assert (folder / "two" / name).read_bytes() == (folder / "one" / name).read_bytes()
    assert done.stdout.count("| model |") == 1  # only the main process speaks
    parts = [lines(folder / "two" / name) for name in ("per_doc.jsonl", "per_doc.1.jsonl")]
    keys = [{json.loads(line)["key"] for line in part} for part in parts]
    whole = {json.loads(line)["key"] for line in lines(folder / "one" / "per_doc.jsonl")}
    assert keys[0] | keys[1] == whole
    assert keys[0] & keys[1] == set()
    assert min(map(len, keys)) > 0.4 * len(whole)

    # both lost the ends of their files: two go on, and a single one after them has nothing left to do
    for name, part in zip(("per_doc.jsonl", "per_doc.1.jsonl"), parts, strict=True):
        (folder / "two" / name).write_text("\n".join(part[: len(part) // 2]) + '\n{"torn')
    (folder / "two" / "results.json").unlink()
    forked.run_ranks(lambda: forked.run_script(SCRIPT, *arguments(folder, "two")), environment=ON_CPUS)
    assert (folder / "two" / "results.json").read_bytes() == (folder / "one" / "results.json").read_bytes()
    before = [lines(folder / "two" / name) for name in ("per_doc.jsonl", "per_doc.1.jsonl")]
    assert sum(map(len, before)) == len(whole)
    alone(folder, "two")
    assert [lines(folder / "two" / name) for name in ("per_doc.jsonl", "per_doc.1.jsonl")] == before


@pytest.mark.slow
def test_an_error_ends_all_processes_with_one_line(folder: Path) -> None:
    done = torchrun(folder, "three", "--lengths", "128,9999")
    assert done.returncode != 0
    assert done.stderr.count("error: 0 of 9 held-out documents have 9999 tokens, at least 2 are needed") == 1


def test_one_process_agrees_with_itself() -> None:
    ranks = Ranks()
    assert (ranks.gather(3), ranks.agree(lambda: 4), ranks.is_main) == ([3], 4, True)


def test_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_ranks() == Ranks()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert open_ranks(alone=True) == Ranks()
    assert not is_main_process()
    monkeypatch.setitem(sys.modules, "accelerate", None)  # as if not installed
    with pytest.raises(MissingDependencyError, match=r"accelerate is needed here .* 'hf-posswap\[train\]'"):
        open_ranks()


@pytest.mark.parametrize(("elsewhere", "raised"), [(None, "here"), (CheckpointError("there"), "there")])
def test_the_first_error_is_raised_by_all(elsewhere: Exception | None, raised: str) -> None:
    def fail() -> None:
        raise CheckpointError("here")

    class Second(Ranks):
        def gather(self, value: Any) -> list[Any]:
            return [elsewhere, value]

    with pytest.raises(CheckpointError, match=raised):
        Second(index=1, count=2).agree(fail)
    if elsewhere is not None:
        with pytest.raises(CheckpointError, match=raised):
            Second(index=1, count=2).agree(lambda: None)


AGREES = """
import pathlib
from hf_posswap.comparison.ranks import open_ranks
ranks = open_ranks()
def act():
    if ranks.index == 1:
        raise MemoryError("no more")
try:
    ranks.agree(act)
except Exception as error:
    said = f"{type(error).__name__}: {error}"
    pathlib.Path(__file__).with_name(f"said {ranks.index}").write_text(said)
"""


def test_an_error_of_any_kind_in_one_process_ends_the_others(tmp_path: Path) -> None:
    (tmp_path / "agrees.py").write_text(AGREES)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run = subprocess.run(
        [*command, str(tmp_path / "agrees.py")],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(Path(hf_posswap.__file__).parents[1])},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert [path.read_text() for path in sorted(tmp_path.glob("said *"))] == [
        "PosswapError: process 1 failed: MemoryError: no more",
        "MemoryError: no more",
    ], run.stderr


def test_parts_of_a_store_are_kept_apart_and_read_together(tmp_path: Path) -> None:
    for number in range(2):
        with RunStore(tmp_path) as main, RunStore(tmp_path, part=1) as other:
            main.value({"unit": 2 * number}, lambda: {"nll": 0.5})
            other.value({"unit": 2 * number + 1}, lambda: {"nll": 1.5})
            main.learn({"unit": 2 * number + 1}, {"nll": 1.5})
            assert main.value({"unit": 2 * number + 1}, lambda: {"nll": 9.0}) == {"nll": 1.5}
    assert {path.name: len(lines(path)) for path in tmp_path.glob("*.jsonl")} == {
        "per_doc.jsonl": 2,
        "per_doc.1.jsonl": 2,
    }
    (tmp_path / "per_doc.1.jsonl").write_text((tmp_path / "per_doc.1.jsonl").read_text() + "torn")
    with RunStore(tmp_path, part=2) as reader:
        assert all(reader.holds({"unit": number}) for number in range(4))
    assert (tmp_path / "per_doc.1.jsonl").read_text().endswith("torn")  # the main process mends, the others only read
    with RunStore(tmp_path) as store:
        assert all(store.holds({"unit": number}) for number in range(4))
    assert not (tmp_path / "per_doc.1.jsonl").read_text().endswith("torn")


def test_a_part_that_outlived_its_main_process_keeps_others_out(tmp_path: Path) -> None:
    with RunStore(tmp_path, part=1), pytest.raises(CheckpointError, match="another process is writing to"):
        RunStore(tmp_path)
    RunStore(tmp_path).close()
