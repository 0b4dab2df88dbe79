"""A file is whole or as it was; what cannot be written is one clear error."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_posswap.errors import CheckpointError
from hf_posswap.utils import atomic_io
from hf_posswap.utils.atomic_io import (
    MARK,
    _exchange,
    alone_in,
    cache_folder,
    read_json,
    read_object,
    replacing,
    scratch_folder,
    settle,
    staging_folder,
    writable_folder,
    write_json,
    write_text,
)
from hf_posswap.utils.user_paths import expand_home


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
    with pytest.raises(CheckpointError, match=r"cannot write .*file.x: .*file is not a folder. Choose another folder"):
        write_text(tmp_path / "file" / "x", "text")
    with pytest.raises(CheckpointError, match=r"cannot write to the folder .*file is not a folder. Choose another"):
        writable_folder(tmp_path / "file")


def _write_torch(path: Path) -> None:
    torch.save({"a": torch.zeros(100_000)}, path)


def _write_safetensors(path: Path) -> None:
    save_file({"a": torch.zeros(100_000)}, path)


def _write_python(path: Path) -> None:
    path.write_bytes(bytes(400_000))


@pytest.mark.slow
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
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 10_000  # the limit was the child's alone


def test_space_is_advised_only_where_there_is_too_little(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    code = f"""
import os
from pathlib import Path
from hf_posswap.utils.atomic_io import CheckpointError, writable_folder, write_text
if os.geteuid() == 0:
    os.seteuid(65534)  # root may write anywhere
for act in (lambda path: write_text(path / "a", "text"), writable_folder):
    try:
        act(Path({str(tmp_path)!r}) / "closed")
    except CheckpointError as error:
        print(error)
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    closed = tmp_path / "closed"
    assert done.stdout.splitlines() == [
        f"cannot write {closed / 'a'}: Permission denied. Choose another folder.",
        f"cannot write to the folder {closed}: Permission denied. Choose another folder.",
    ]


KILLED = """
import os, signal, sys
from pathlib import Path
from hf_posswap.utils import atomic_io
target, way = Path(sys.argv[1]), sys.argv[2]
if way != "writing":
    atomic_io._exchange = lambda one, other: False
with atomic_io.replacing(target) as temporary:
    temporary.mkdir()
    (temporary / "new").touch()
    if way == "writing":
        os.kill(os.getpid(), signal.SIGKILL)
    renamed = os.rename
    def deadly(one, other):
        renamed(one, other)
        if way == "aside" or str(other) == str(target):
            os.kill(os.getpid(), signal.SIGKILL)
    os.rename = deadly
"""


def killed_while(way: str, target: Path) -> list[str]:
    """Kill a process while it replaces the folder `target`, and return the names of what it left beside it."""
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", KILLED, str(target), way], cwd=root, check=False)
    assert done.returncode == -9
    return [path.name for path in target.parent.iterdir() if path.name.startswith(MARK)]


def test_leftovers_of_a_dead_writer_are_removed_and_nothing_else(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    others = [f".partial-{dead.pid}-a.txt", ".partial-download", ".partial-1", "notes.txt"]
    for name in others:
        (tmp_path / name).write_text("another program's")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / f".partial-{dead.pid}-model").touch()
    (tmp_path / "model").mkdir()
    assert len(killed_while("writing", tmp_path / "model")) == 1
    (tmp_path / "deep" / "model").mkdir()
    (deep,) = killed_while("writing", tmp_path / "deep" / "model")
    with staging_folder(tmp_path) as living:
        writable_folder(tmp_path)
        left = sorted(path.name for path in tmp_path.iterdir())
        assert left == sorted([*others, "deep", "model", living.name])
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == sorted(
        [f".partial-{dead.pid}-model", deep, "model"]
    )  # whoever writes there again removes it


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners here")
def test_leftovers_of_other_users_are_left_where_anyone_may_make_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_while("writing", tmp_path / "model")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    user = os.geteuid()
    for who, left in ((user + 1, 1), (user, 0)):
        monkeypatch.setattr("os.geteuid", lambda who=who: who)
        with scratch_folder():
            pass
        assert len(list(tmp_path.iterdir())) == left


def test_a_full_disk_of_temporary_files_is_said_to_be_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with (
        pytest.raises(CheckpointError, match=r"cannot write .*card: No space left.*TMPDIR chooses where\."),
        scratch_folder() as folder,
    ):
        write_text(folder / "card", "text")
    assert list(tmp_path.iterdir()) == []


def test_a_write_removes_what_killed_writes_beside_it_left(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert killed_while("writing", tmp_path / "model")
    write_text(tmp_path / "a.txt", "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "model"]


def test_json_round_trip_and_its_errors(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": [1, 2.5, None]})
    assert read_json(tmp_path / "a.json") == {"x": [1, 2.5, None]}
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(tmp_path / "b.json", float("nan"))
    assert not (tmp_path / "b.json").exists()
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*c.json.*Delete it"):
        read_json(tmp_path / "c.json")
    with pytest.raises(CheckpointError, match=r"cannot read .*missing.json: there is no such file; give the path"):
        read_json(tmp_path / "missing.json")


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_is_replaced_with_and_without_an_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr("hf_posswap.utils.atomic_io._exchange", lambda one, other: False)
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


@pytest.mark.parametrize("repair", [lambda path: settle(path), lambda path: writable_folder(path.parent)])
def test_a_folder_that_a_killed_writer_set_aside_is_put_back(tmp_path: Path, repair: Callable[[Path], object]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()
    killed_while("aside", tmp_path / "model")
    assert not (tmp_path / "model").exists()
    repair(tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["old"]
    writable_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_a_killed_writer_replaced_stays_replaced(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()
    killed_while("replaced", tmp_path / "model")
    settle(tmp_path / "model")
    writable_folder(tmp_path)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_cannot_be_settled_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    killed_while("aside", tmp_path / "model")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.rename", refuse)  # root may rename anything
    with pytest.raises(CheckpointError, match=r"saving .*model was interrupted.*Permission denied. Rename it yourself"):
        settle(tmp_path / "model")
    assert len(list(tmp_path.rglob("old/model"))) == 1  # and it is still there


def test_a_folder_goes_back_where_its_successor_cannot_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()
    monkeypatch.setattr(atomic_io, "_exchange", lambda one, other: False)
    rename = os.rename

    def refuse(one: Path, other: Path) -> None:
        if Path(one).parent.name == "new":
            raise PermissionError(13, "Permission denied")
        rename(one, other)

    monkeypatch.setattr("os.rename", refuse)
    with (
        pytest.raises(CheckpointError, match=r"cannot write .*model: Permission denied"),
        replacing(tmp_path / "model") as temporary,
    ):
        temporary.mkdir()
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("length", [200, 250, 255])
def test_any_name_that_the_file_system_takes_is_written(tmp_path: Path, length: int) -> None:
    write_text(tmp_path / ("a" * length), "whole")
    assert (tmp_path / ("a" * length)).read_text() == "whole"


@pytest.mark.parametrize("length", [256, 5000])
def test_a_name_that_is_too_long_is_one_clear_error(tmp_path: Path, length: int) -> None:
    path = tmp_path / ("a" * length)
    with pytest.raises(CheckpointError, match=r"cannot write .*aaa.*: File name too long. Choose another folder"):
        write_text(path, "text")
    with pytest.raises(CheckpointError, match="cannot write to the folder .*File name too long. Choose another"):
        writable_folder(path)
    with pytest.raises(CheckpointError, match="cannot read .*File name too long"):
        read_json(path)
    settle(path)  # it cannot have been made


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "{", "\xff", "9" * 5000])
def test_what_is_no_json_is_one_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"cannot read .*a.json: .*Delete it"):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize("held", ["[]", "{}", '{"a": 1}', '{"a": [], "b": 2}', "null"])
def test_an_object_that_misses_a_field_is_named(tmp_path: Path, held: str) -> None:
    (tmp_path / "a.json").write_text(held)
    with pytest.raises(CheckpointError, match=r"a.json must hold a JSON object with a, b: .*Delete it"):
        read_object(tmp_path / "a.json", a=list, b=str)
    (tmp_path / "a.json").write_text('{"a": [], "b": "", "c": 1}')
    assert read_object(tmp_path / "a.json", a=list, b=str)["c"] == 1


def test_a_user_without_a_home_is_told_to_name_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> None:
        raise KeyError("uid")

    for name in ("HOME", "XDG_CACHE_HOME", "HF_POSSWAP_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(CheckpointError, match="HOME is not set, and this user has no home. Set HF_POSSWAP_CACHE"):
        cache_folder(None)
    with pytest.raises(CheckpointError, match="'~/x': this user has no home folder, and HOME is not set. Give the"):
        expand_home("~/x")


@pytest.mark.parametrize("name", ["~no-such-user", "~\0", "~\udce4", "~" + "a" * 9999])
def test_the_home_of_nobody_is_one_clear_error(name: str) -> None:
    with pytest.raises(CheckpointError, match="is the home folder of no user of this machine. Give the path in full"):
        expand_home(f"{name}/runs")


def test_a_folder_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    with alone_in(tmp_path, "training"):
        with (
            pytest.raises(CheckpointError, match="another training writes to .*wait for it"),
            alone_in(tmp_path, "training"),
        ):
            pass
    with alone_in(tmp_path, "training"):
        pass


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EXDEV])
@pytest.mark.parametrize("is_folder", [True, False])
def test_what_another_file_system_holds_stays_and_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_folder: bool
) -> None:
    target = tmp_path / "model"
    kept = target / "old" if is_folder else target
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("old")

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    for module, name in ((atomic_io, "_exchange"), (os, "replace"), (os, "rename")):
        monkeypatch.setattr(module, name, refuse)

    def write() -> None:
        with replacing(target) as temporary:
            if is_folder:
                temporary.mkdir()
            (temporary / "new" if is_folder else temporary).write_text("new")

    with pytest.raises(CheckpointError, match=f"{os.strerror(number)}. It is a mount point, or .*choose a new folder"):
        write()
    assert kept.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
