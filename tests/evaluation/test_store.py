"""Killed runs go on and end with the same bits; two at once are refused; what is damaged is said."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hf_posswap.errors import CheckpointError, DataError
from hf_posswap.evaluation.store import ARRAYS, LINES, RunStore, unit_key

ROOT = Path(__file__).resolve().parents[2]
UNITS = 40
WORK = """
import importlib.util, sys, time
from pathlib import Path
import numpy as np

# by its file, so that torch, which the store does not need, is not loaded each time
spec = importlib.util.spec_from_file_location("store", Path("hf_posswap", "evaluation", "store.py"))
module = sys.modules["store"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
RunStore = module.RunStore

folder, units = Path(sys.argv[1]), int(sys.argv[2])
total = 0.0
with RunStore(folder) as store:
    print("open", flush=True)
    for number in range(units):
        def compute():
            with (folder / "computed.log").open("a") as log:
                log.write(f"{number}\\n")
            time.sleep(0.01)
            values = np.random.default_rng(number).normal(size=2000).astype(np.float32)
            return values if number % 2 else {"sum": float(values.sum(dtype=np.float64)) / 3}
        value = store.value({"document": number, "protocol": "test"}, compute)
        total += value["sum"] if isinstance(value, dict) else float(value.sum(dtype=np.float64))
print(total.hex())
"""


def start(folder: Path, units: int = UNITS) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORK, str(folder), str(units)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(folder: Path, units: int = UNITS) -> str:
    out, err = start(folder, units).communicate(timeout=120)
    assert "open" in out, err
    return out.splitlines()[-1]


def survive(tmp_path: Path, kills: int, units: int) -> None:
    """Kill a run at random moments, let it end, and compare with one that was left alone."""
    undisturbed, killed = finish(tmp_path / "a", units), tmp_path / "b"
    moments = random.Random(0)
    done = 0
    for _ in range(kills):
        process = start(killed, units)
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        time.sleep(moments.uniform(0.0, 0.02 * units / kills))
        process.send_signal(signal.SIGKILL)
        process.wait()
        lines = (killed / LINES).read_bytes().count(b"\n") if (killed / LINES).exists() else 0
        assert lines >= done  # nothing that was kept is lost
        done = lines
    assert finish(killed, units) == undisturbed
    computed = (killed / "computed.log").read_text().split()
    assert set(computed) == {str(number) for number in range(units)}
    assert len(computed) <= units + kills  # at most the unit in flight is lost each time
    assert finish(killed, units) == undisturbed
    assert len((killed / "computed.log").read_text().split()) == len(computed)  # all is found, nothing computed
    assert not list(killed.rglob(".partial-*"))


@pytest.mark.slow
def test_three_kills_lose_at_most_the_unit_in_flight(tmp_path: Path) -> None:
    survive(tmp_path, 3, UNITS)


@pytest.mark.slow
def test_twenty_kills_lose_at_most_the_unit_in_flight(tmp_path: Path) -> None:
    survive(tmp_path, 20, 5 * UNITS)


@pytest.mark.parametrize("torn", [1, 20, 90])
def test_a_torn_last_line_is_cut_off_and_computed_again(tmp_path: Path, torn: int) -> None:
    for number in range(3):
        with RunStore(tmp_path) as store:
            store.value({"document": number}, lambda: {"nll": 0.1})
    path = tmp_path / LINES
    path.write_bytes(path.read_bytes()[:-torn])
    with RunStore(tmp_path) as store:
        values = [store.value({"document": number}, lambda: {"nll": 0.2}) for number in range(3)]
        assert store.computed == 1
    assert values == [{"nll": 0.1}, {"nll": 0.1}, {"nll": 0.2}]
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [entry["key"] for entry in entries] == [unit_key({"document": number}) for number in range(3)]


def test_floats_and_arrays_come_back_bit_by_bit(tmp_path: Path) -> None:
    value = {"a": 0.1 + 0.2, "b": [1e-300, float(np.float32(1) / 3)]}
    array = np.random.default_rng(0).normal(size=9).astype(np.float32)
    for _ in range(2):
        with RunStore(tmp_path) as store:
            assert store.value({"unit": 1}, lambda: value) == value
            np.testing.assert_array_equal(store.value({"unit": 2}, lambda: array), array)
    assert store.computed == 0
    next((tmp_path / "nll").iterdir()).unlink()
    with RunStore(tmp_path) as store:
        assert store.holds({"unit": 1})
        assert not store.holds({"unit": 2})


def test_two_processes_on_one_store_are_refused(tmp_path: Path) -> None:
    with RunStore(tmp_path):
        out, err = start(tmp_path).communicate(timeout=60)
    assert out == ""
    assert f"another process is writing to {tmp_path}: wait until it ends, or give another folder." in err
    assert finish(tmp_path) != ""


def test_a_failing_unit_is_not_kept_and_lets_go_of_the_store(tmp_path: Path) -> None:
    def fail() -> dict[str, float]:
        raise KeyboardInterrupt

    def run() -> None:
        with RunStore(tmp_path) as store:
            store.value({"unit": 1}, lambda: {"nll": 1.0})
            store.value({"unit": 2}, fail)

    with pytest.raises(KeyboardInterrupt):
        run()
    with RunStore(tmp_path) as store:
        assert (store.holds({"unit": 1}), store.holds({"unit": 2})) == (True, False)


def test_what_json_does_not_have_is_refused(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        with pytest.raises(DataError, match="a unit's value is JSON or an array"):
            store.value({"unit": 1}, lambda: {"nll": float("nan")})
        with pytest.raises(DataError, match="a unit is named by JSON"):
            store.value({"unit": {1}}, lambda: {"nll": 1.0})
        assert not store.holds({"unit": 1})


def store_of_one_array(folder: Path) -> tuple[np.ndarray, Path]:
    array = np.arange(9, dtype=np.float32)
    with RunStore(folder) as store:
        store.value({"unit": 1}, lambda: array)
    return array, next((folder / ARRAYS).iterdir())


def flipped(path: Path, at: int) -> bytes:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    return bytes(content)


def other_array(path: Path) -> bytes:
    content = io.BytesIO()
    np.save(content, np.load(path) + 1)
    return content.getvalue()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flipped(path, -1),  # the lowest bits of a number
        lambda path: flipped(path, 0),
        lambda path: path.read_bytes()[:-4],
        lambda path: path.read_bytes() + b"\0",
        lambda path: b"",
        other_array,
    ],
)
def test_a_damaged_array_is_measured_anew_and_never_believed(tmp_path: Path, damage: Callable[[Path], bytes]) -> None:
    array, path = store_of_one_array(tmp_path)
    path.write_bytes(damage(path))
    with RunStore(tmp_path) as store:
        assert not store.holds({"unit": 1})
        np.testing.assert_array_equal(store.value({"unit": 1}, lambda: array), array)
        assert store.computed == 1
    with RunStore(tmp_path) as store:  # and it is whole again
        assert store.holds({"unit": 1})


def test_the_array_of_another_unit_is_not_believed(tmp_path: Path) -> None:
    _, path = store_of_one_array(tmp_path)
    with RunStore(tmp_path) as store:
        store.value({"unit": 2}, lambda: np.ones(9, np.float32))
    (other,) = set((tmp_path / ARRAYS).iterdir()) - {path}
    path.write_bytes(other.read_bytes())
    with RunStore(tmp_path) as store:
        assert (store.holds({"unit": 1}), store.holds({"unit": 2})) == (False, True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"nll": 1.5', '"nll": 2.5'),
        ('"sha256": "', '"sha256": "0'),
        (', "sha256": "', ', "sha": "'),
        ('"value": {"nll": 1.5}', '"value": {"array": "../../etc/passwd"}'),
        ('"value": {"nll": 1.5}', '"value": ' + "[" * 100_000 + "]" * 100_000),
        ('"nll": 1.5', '"nll": NaN'),
        ('"nll": 1.5', '"nll": ' + "9" * 5000),
    ],
)
def test_a_changed_line_is_refused_and_never_believed(tmp_path: Path, old: str, new: str) -> None:
    with RunStore(tmp_path) as store:
        store.value({"unit": 1}, lambda: {"nll": 1.5})
    text = (tmp_path / LINES).read_text()
    assert old in text
    (tmp_path / LINES).write_text(text.replace(old, new))
    with pytest.raises(CheckpointError, match=r"per_doc.jsonl, line 1 is damaged .*: delete that line, or the file"):
        RunStore(tmp_path)


def test_a_line_for_which_there_is_no_room_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with RunStore(tmp_path) as store:
        store.value({"unit": 1}, lambda: {"nll": 1.5})
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(
                CheckpointError, match=r"cannot write to .*: No space left on device. Earlier measurements"
            ):
                store.value({"unit": 2}, lambda: {"nll": 1.5})
            with pytest.raises(
                CheckpointError, match=r"cannot write to .*: No space left on device. Earlier measurements"
            ):
                store.value({"unit": 3}, lambda: np.ones(3))
        store.value({"unit": 2}, lambda: {"nll": 1.5})  # there is room again
    with RunStore(tmp_path) as store:
        assert [store.holds({"unit": n}) for n in (1, 2, 3)] == [True, True, False]


def test_a_unit_is_kept_if_ctrl_c_comes_while_the_disk_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    with RunStore(tmp_path) as store, monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.value({"unit": 1}, lambda: {"nll": 1.5})
    with RunStore(tmp_path) as store:
        assert store.value({"unit": 1}, lambda: pytest.fail("it was measured")) == {"nll": 1.5}


@pytest.mark.parametrize("line", ["not json\n", "{}\n", '{"key": "0", "unit": {"a": 1}, "value": {"nll": 1}}\n', "3\n"])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    with RunStore(tmp_path) as store:
        store.value({"unit": 1}, lambda: {"nll": 1.0})
    with (tmp_path / LINES).open("a") as file:
        file.write(line)
    with pytest.raises(CheckpointError, match=r"per_doc.jsonl, line 2 is damaged .*: delete that line, or the file"):
        RunStore(tmp_path)
    (tmp_path / LINES).unlink()
    RunStore(tmp_path).close()  # the failed opening let go of the lock


def test_a_store_closed_by_another_thread_than_opened_it_is_free_again(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as thread:
        store = thread.submit(RunStore, tmp_path).result()
        store.close()
        RunStore(tmp_path).close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="cannot write to the folder"):
        RunStore(tmp_path / "below")


def test_a_file_in_the_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot write to the folder"):
        RunStore(tmp_path / "file")
