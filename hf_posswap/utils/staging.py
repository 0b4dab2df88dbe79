"""Folders in which one call makes something before it takes its place, and which the next writer removes.

A staging folder belongs to the call that made it for as long as that holds the lock in it; the system lets go of the
lock when the process ends, however it ends. So nobody has to guess from a number whether a writer still lives: not
for threads, nor for containers that share a folder, nor after a process id was given away again.

It holds the lock, `new/NAME` (what is made) and, where a folder cannot be exchanged at once, `old/NAME` (what stepped
aside for it).
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

MARK = ".posswap-partial-"
"""How the names of staging folders begin."""
NEW, OLD = "new", "old"
_LOCK = "writer.lock"
_TRIES = 10


@contextmanager
def staging_folder(parent: Path) -> Iterator[Path]:
    """Give a new folder in `parent` that is this call's alone; at the end it is removed, with what is left in it.

    What stepped aside from a place that is still empty goes back there first.

    Raises:
        OSError: no folder can be made there.
    """
    folder, lock = _locked_folder(parent)
    try:
        yield folder
    finally:
        with suppress(OSError):  # what cannot go back stays where `settle` finds it
            _put_back(folder)
            _remove(folder)
        if lock is not None:
            lock.release(force=True)
        with suppress(OSError):  # where a file that is open cannot be removed, the lock is left
            if folder.is_dir() and not any((folder / OLD).glob("*")):
                _remove(folder)


def sweep(parent: Path, *, own: bool = False) -> None:
    """Remove the staging folders in `parent` whose writers are gone, and nothing else.

    What a killed writer had set aside takes its place back first, where nothing has taken it.

    Args:
        parent: which may be missing.
        own: leave those of other users, where anyone may make a folder of any name: as in /tmp.
    """
    for folder in _staging_folders(parent):
        if own and not _is_own(folder):
            continue
        with _taken_over(folder) as dead, suppress(OSError):
            if dead:
                _put_back(folder)
                _remove(folder)


def put_back(path: Path) -> None:
    """Put `path` back where a writer was killed after it had set it aside.

    Raises:
        OSError: it is there, and cannot be put back; `filename` is where it lies.
    """
    for folder in _staging_folders(path.parent):
        aside = folder / OLD / path.name
        if not aside.exists():
            continue
        with _taken_over(folder) as dead:
            if dead:
                try:
                    _put_back(folder)
                except OSError as error:
                    raise OSError(error.errno, error.strerror, str(aside)) from error


def _locked_folder(parent: Path) -> tuple[Path, FileLock | None]:
    """Return a new folder and its lock, taken; None where the file system has no locks: then nobody else takes it."""
    for _ in range(_TRIES):
        folder = Path(tempfile.mkdtemp(prefix=MARK, dir=parent))
        lock = FileLock(folder / _LOCK, thread_local=False)
        try:
            lock.acquire(blocking=False)
        except Timeout:  # a sweep saw it before it was locked, and removes it
            continue
        except (OSError, NotImplementedError):
            if folder.is_dir():
                return folder, None
            continue
        if (folder / _LOCK).exists():
            return folder, lock
        lock.release(force=True)
    raise OSError(None, "other processes remove what is made there")


def _staging_folders(parent: Path) -> list[Path]:
    if not parent.is_dir():
        return []
    with os.scandir(parent) as entries:
        return [Path(e.path) for e in entries if e.name.startswith(MARK) and e.is_dir(follow_symlinks=False)]


def _is_own(folder: Path) -> bool:
    try:
        return not hasattr(os, "geteuid") or folder.lstat().st_uid == os.geteuid()
    except OSError:
        return False


@contextmanager
def _taken_over(folder: Path) -> Iterator[bool]:
    """Give whether the writer of a staging folder is gone; inside the block nobody else finds it so."""
    lock = FileLock(folder / _LOCK, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except (Timeout, OSError, NotImplementedError):
        yield False
        return
    try:
        yield True
    finally:
        lock.release(force=True)


def _put_back(folder: Path) -> None:
    for aside in (folder / OLD).glob("*"):
        target = folder.parent / aside.name
        if os.path.lexists(target):
            continue
        try:
            os.rename(aside, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another writer has taken the place meanwhile
                raise


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
