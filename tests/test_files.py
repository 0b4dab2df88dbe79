"""A file is whole or as it was; what cannot be written is one clear error."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_posswap.errors import CheckpointError
from hf_posswap.files import _exchange, read_json, replacing, settle, writable_folder, write_json, write_text


def test_an_interrupted_write_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")

    def write() -> None:
        with replacing(target) as temporary:
            temporary.write_text("ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert target.read_text() == "old"


def test_a_folder_takes_the_place_of_a_folder(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").touch()
    with replacing(target) as temporary:
        temporary.mkdir()
        (temporary / "new").touch()
    assert [path.name for path in target.iterdir()] == ["new"]


def test_parents_are_made_and_other_errors_pass_through(tmp_path: Path) -> None:
    write_text(tmp_path / "a" / "b" / "c.txt", "text")
    assert (tmp_path / "a" / "b" / "c.txt").read_text() == "text"
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "x"):
        raise ZeroDivisionError


def test_a_place_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write .*file.x.*choose another folder"):
        write_text(tmp_path / "file" / "x", "text")
    with pytest.raises(CheckpointError, match=r"cannot write to the folder .*Choose another"):
        writable_folder(tmp_path / "file")


def _write_torch(path: Path) -> None:
    torch.save({"a": torch.zeros(100_000)}, path)


def _write_safetensors(path: Path) -> None:
    save_file({"a": torch.zeros(100_000)}, path)


def _write_python(path: Path) -> None:
    path.write_bytes(bytes(400_000))


@pytest.mark.parametrize("writer", ["_write_torch", "_write_safetensors", "_write_python"])
def test_no_room_is_one_clear_error_whoever_writes(tmp_path: Path, writer: str) -> None:
    # the limit on a file's size stands for a full disk: the same system call fails, with another number
    code = f"""
import importlib.util, resource, signal, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("here", {str(Path(__file__))!r})
here = importlib.util.module_from_spec(spec); spec.loader.exec_module(here)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    with here.replacing(Path({str(tmp_path)!r}) / "big") as temporary:
        here.{writer}(temporary)
except here.CheckpointError as error:
    sys.exit(0 if "Free some space" in str(error) else 3)
sys.exit(4)
"""
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 10_000  # the limit was the child's alone


def test_leftovers_of_a_dead_process_are_removed_and_of_a_living_one_not(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".partial-{dead.pid}-a.txt").touch()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / f".partial-{dead.pid}-model").mkdir()
    (tmp_path / f".partial-{os.getppid()}-b.txt").touch()
    writable_folder(tmp_path)
    left = sorted(path.name for path in tmp_path.rglob("*"))
    assert left == [f".partial-{os.getppid()}-b.txt", "deep"]


def test_json_round_trip_and_its_errors(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": [1, 2.5, None]})
    assert read_json(tmp_path / "a.json") == {"x": [1, 2.5, None]}
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(tmp_path / "b.json", float("nan"))
    assert not (tmp_path / "b.json").exists()
    (tmp_path / "c.json").write_text("{")
    for name in ("c.json", "missing.json"):
        with pytest.raises(CheckpointError, match=rf"cannot read .*{name}.*Delete it"):
            read_json(tmp_path / name)


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_is_replaced_with_and_without_an_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr("hf_posswap.files._exchange", lambda one, other: False)
    elif sys.platform not in ("linux", "darwin"):
        pytest.skip("this system exchanges no folders")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()
    (tmp_path / "link").symlink_to(tmp_path / "model")
    with replacing(tmp_path / "link") as temporary:
        temporary.mkdir()
        (temporary / "new").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "model"]
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["new"]


def test_an_exchange_that_fails_for_good_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert _exchange(tmp_path / "a", tmp_path / "a")
    with pytest.raises(FileNotFoundError, match="missing"):
        _exchange(tmp_path / "a", tmp_path / "missing")


def test_what_a_killed_process_left_is_settled(tmp_path: Path) -> None:
    (tmp_path / ".replaced-model").mkdir()
    (tmp_path / ".replaced-model" / "old").touch()
    settle(tmp_path / "model")  # killed before the successor came
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (tmp_path / ".replaced-model").mkdir()
    settle(tmp_path / "model")  # killed after it
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "old").exists()


def test_what_cannot_be_settled_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".replaced-model").mkdir()

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.rename", refuse)  # root may rename anything
    with pytest.raises(CheckpointError, match=r"saving .*model was interrupted.*Permission denied. Rename it by hand"):
        settle(tmp_path / "model")


def test_a_write_removes_what_killed_writes_of_the_same_place_left(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".partial-{dead.pid}-a.txt").touch()
    (tmp_path / f".partial-{dead.pid}-b.txt").touch()
    write_text(tmp_path / "a.txt", "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".partial-{dead.pid}-b.txt", "a.txt"]
