"""The watch over what is read sees what it is there for: each kind of harm, done on purpose, is found."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_posswap.errors import DataError
from tests.fuzz import hostile


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "read").mkdir()
    hostile.plant(tmp_path / "read")
    return tmp_path / "read"


def import_it(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    try:
        __import__(hostile.CANARY)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(hostile.CANARY, None)


@pytest.mark.parametrize(
    "harm",
    [
        import_it,
        lambda folder: os.system("true"),
        lambda folder: subprocess.run(["true"], check=True),
        lambda folder: (folder.parent / "new").write_text(""),
        lambda folder: (folder / ".." / "outside" / "secret").read_text(),
        lambda folder: (folder.parent / "outside" / "secret").unlink(),
        lambda folder: os.rename(folder.parent / "outside", folder / "inside"),
        lambda folder: socket.create_connection(("127.0.0.1", 9), timeout=0.01),
    ],
)
def test_harm_is_seen(folder: Path, harm: Callable[[Path], Any]) -> None:
    with pytest.raises((AssertionError, OSError)):
        hostile.survives(lambda: harm(folder), folder)
    assert hostile._watched().seen != [] or (folder / "ran").exists()


def test_bare_errors_and_empty_messages_are_seen(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        hostile.survives(lambda: 1 // 0, folder)
    with pytest.raises(AssertionError):
        hostile.survives(lambda: (_ for _ in ()).throw(DataError("")), folder)


def test_a_hang_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile, "SECONDS", 1)
    with pytest.raises(hostile.Hang):
        hostile.survives(lambda: time.sleep(20), folder)


def test_what_is_right_is_done_and_what_is_refused_is_not(folder: Path) -> None:
    assert hostile.survives(lambda: (folder / "new").write_text((folder / "canary.py").read_text()), folder)
    assert not hostile.survives(lambda: (_ for _ in ()).throw(DataError("no")), folder)
