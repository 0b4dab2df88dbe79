"""A full disk, a read-only one and an image's layer, each a file system of its own, and a user without a home.

One clear error, and what was there stays.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Tally = Callable[[str, int, int], None]
CHILD = Path(__file__).with_name("faults_child.py")
ROOM_FOR_TWO = "6m"
"""For two checkpoints with their remote code, and not for three."""
_MOUNT = "mount -t tmpfs -o size={size} tmpfs {place}"


@functools.cache
def can_mount() -> bool:
    """Return whether this user may mount a file system in a namespace of its own, which ends with the process."""
    try:
        command = ["unshare", "-Urm", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
        return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0
    except OSError:
        return False


def within(place: Path, size: str, *steps: str) -> list[str]:
    """Run shell `steps` where `place` is a file system of that size, and return the lines of their output."""
    if not can_mount():
        pytest.skip("this user may not mount file systems")
    script = " && ".join([_MOUNT.format(size=size, place=place), *steps])
    command = ["unshare", "-Urm", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def act(name: str, place: Path, seed: int = 0) -> str:
    return f"{sys.executable} {CHILD} {name} {place} {seed}"


def answers(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines if line.startswith("{")]


LISTED = "find {place} -type f -not -name .lock -not -path '*/store/*' | sort | xargs -r sha256sum"


@pytest.mark.parametrize("room", ["20K", pytest.param("200K", marks=pytest.mark.slow)])
def test_a_full_disk_leaves_the_checkpoint_that_was_there(tmp_path: Path, tally: Tally, room: str) -> None:
    listed = LISTED.format(place=tmp_path)
    fill = f"head -c $(($(df -B1 --output=avail {tmp_path} | tail -1) - {room.replace('K', '000')})) /dev/zero"
    lines = within(
        tmp_path, ROOM_FOR_TWO, act("save", tmp_path), listed, f"echo ---; {fill} > {tmp_path}/filler",
        act("save", tmp_path, 1), f"rm {tmp_path}/filler", listed, "echo ---",
        act("save", tmp_path, 1), f"ls -A {tmp_path}",
    )  # fmt: skip
    first, full, later = answers(lines)
    assert "value" in first
    assert full["error"] == "CheckpointError"
    assert "No space left on device" in full["message"] or "os error 28" in full["message"]
    assert "Free some space or choose another folder" in full["message"]
    marks = [number for number, line in enumerate(lines) if line == "---"]
    sums = [[line for line in part if "  /" in line] for part in (lines[: marks[0]], lines[marks[0] : marks[1]])]
    assert sums[0] == sums[1] != []
    assert "value" in later
    assert lines[-1] == "model"  # nothing else is left
    tally("full disk", 1, 1)


def test_a_store_goes_on_after_a_full_disk(tmp_path: Path, tally: Tally) -> None:
    lines = within(
        tmp_path, "1m", act("store", tmp_path), f"mount -o remount,size=8m {tmp_path}", act("store", tmp_path),
        act("store", tmp_path), f"find {tmp_path} -name '.posswap*' | wc -l",
    )  # fmt: skip
    full, later, again = answers(lines)
    assert full["error"] == "CheckpointError"
    assert "No space left on device. Earlier measurements are kept: free some space and start again" in full["message"]
    assert 0 < later["value"]["computed"] < 60
    assert again["value"]["computed"] == 0
    assert lines[-1] == "0"
    tally("full disk", 1, 1)


@pytest.mark.parametrize("name", ["save", "store", "compare", "text"])
def test_a_read_only_disk_is_one_clear_error(tmp_path: Path, tally: Tally, name: str) -> None:
    (answer,) = answers(within(tmp_path, "8m", f"mount -o remount,ro {tmp_path}", act(name, tmp_path)))
    assert answer["error"] == "CheckpointError"
    assert "Read-only file system" in answer["message"]
    tally("read-only disk", 1, 1)


def test_a_mount_point_is_refused_before_anything_is_written(tmp_path: Path, tally: Tally) -> None:
    place = tmp_path / "model"
    patch = f"{sys.executable} -m hf_posswap patch nobody/nothing rope -o {place}"
    lines = within(
        tmp_path, "8m", f"mkdir {place}", f"mount -t tmpfs tmpfs {place}", act("save", tmp_path),
        f"cd {CHILD.parents[2]}", f"{{ {patch} 2>&1 || true; }}", f"find {tmp_path} -mindepth 1",
    )  # fmt: skip
    (answer,) = answers(lines)
    assert answer["error"] == "CheckpointError"
    assert f"{place} is a mount point, which a save cannot replace as a whole; give a folder in it" in answer["message"]
    assert "is a mount point" in " ".join(lines[1:])
    assert lines[-1] == str(place)
    tally("mount point", 2, 2)


def test_a_file_that_is_mounted_stays(tmp_path: Path, tally: Tally) -> None:
    (answer, *kept) = within(
        tmp_path, "8m", f"echo old > {tmp_path}/a.txt", f"echo mounted > {tmp_path}/b.txt",
        f"mount --bind {tmp_path}/b.txt {tmp_path}/a.txt", act("text", tmp_path), f"cat {tmp_path}/a.txt",
        f"ls -A {tmp_path}",
    )  # fmt: skip
    assert json.loads(answer)["error"] == "CheckpointError"
    assert "It is a mount point, or comes from a read-only layer" in json.loads(answer)["message"]
    assert kept == ["mounted", "a.txt", "b.txt"]
    tally("mount point", 1, 1)


def test_a_checkpoint_on_a_read_only_disk_is_loaded(tmp_path: Path, tally: Tally) -> None:
    load = f"{sys.executable} -c 'import hf_posswap; hf_posswap.load(\"{tmp_path}/model\")'"
    within(tmp_path, "8m", act("save", tmp_path), f"mount -o remount,ro {tmp_path}", load)
    tally("read-only disk", 1, 1)


@functools.cache
def can_layer() -> bool:
    """Return whether this user may put one folder over another, as containers have their images."""
    steps = (
        "mount -t tmpfs t /mnt && cd /mnt && mkdir a b c d && mount -t overlay o -o lowerdir=a,upperdir=b,workdir=c d"
    )
    try:
        return subprocess.run(["unshare", "-Urm", "sh", "-c", steps], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def test_a_checkpoint_of_an_image_is_refused_as_a_place_and_stays(tmp_path: Path, tally: Tally) -> None:
    """A folder of the layer below cannot be renamed: EXDEV."""
    if not can_layer():
        pytest.skip("this user may not mount layers")
    listed = LISTED.format(place="layers")
    lines = within(
        tmp_path, "16m", f"cd {tmp_path}", "mkdir image own work layers", act("save", tmp_path / "image"),
        act("text", tmp_path / "image"), "mount -t overlay o -o lowerdir=image,upperdir=own,workdir=work layers",
        listed, "echo ---", act("save", tmp_path / "layers", 1), listed, "echo ---",
        act("text", tmp_path / "layers", 1), f"{{ {act('save', tmp_path / 'layers' / 'new', 1)}; }}",
        "head -c 3 layers/a.txt", "echo", "find layers -name '.posswap*' | wc -l",
    )  # fmt: skip
    first, one, refused, text, new = answers(lines)
    assert [first, one, text, new] == [{"value": None}] * 4
    assert refused["error"] == "CheckpointError"
    assert "It is a mount point, or comes from a read-only layer below its file system" in refused["message"]
    marks = [number for number, line in enumerate(lines) if line == "---"]
    sums = [[line for line in part if "  layers" in line] for part in (lines[: marks[0]], lines[marks[0] : marks[1]])]
    assert sums[0] == sums[1] != []
    assert lines[-2:] == ["111", "0"]
    tally("image layer", 3, 3)


PLACES = {
    "32 files": ["sh", "-c", 'ulimit -n 32; exec "$@"', "-"],
    "no home": ["env", "-u", "HOME", "-u", "XDG_CACHE_HOME", "-u", "HF_POSSWAP_CACHE", "unshare", "-U",
                "--map-user=54321"],
    "a home that is not there": ["env", "-u", "XDG_CACHE_HOME", "-u", "HF_POSSWAP_CACHE", "HOME=/proc/nobody"],
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_all_is_done_with_few_open_files_and_without_a_home(name: str, tmp_path: Path, tally: Tally) -> None:
    if name == "no home" and not can_mount():
        pytest.skip("this user may not be another one")
    command = [*PLACES[name], sys.executable, str(CHILD), "use", str(tmp_path), "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (answer,) = answers(done.stdout.splitlines())
    if "home" in name:
        assert answer["error"] == "CheckpointError"
        assert "HF_POSSWAP_CACHE" in answer["message"]
    else:
        assert answer == {"value": None}
    assert (tmp_path / "model.gguf").is_file()
    assert (tmp_path / "out" / "results.json").is_file()
    assert not (tmp_path / "~").exists()
    tally(name, 1, 1)
