"""Writing files and folders so that a reader finds the old content or the new one, never half of it.

A folder changes places with its successor in one system call where the system has one (Linux, macOS). Elsewhere the old
one steps aside first, under a name that `settle` knows: whoever reads the folder next puts it back if its successor
never came.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hf_posswap.errors import CheckpointError, PosswapError

_MARK = ".partial-"
_ASIDE = ".replaced-"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # Linux: fcntl.h, fs.h
_RENAME_SWAP = 2  # macOS: stdio.h
_NOT_THERE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)  # the system or the file system has it not
_SAID_BY_WRITERS = ("os error", "inline_container", "PytorchStreamWriter")  # safetensors; torch.save, twice


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`, a file or a folder to make; at the end it takes the place of `path`.

    Whatever ends the block early, Ctrl-C included, removes the temporary and leaves `path` as it was. A process that is
    killed leaves `path` old or new, whole; what else it leaves, the next one to write `path` removes.

    Raises:
        CheckpointError: the place cannot be written or the disk is full.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     target = Path(folder) / "a.txt"
        ...     with replacing(target) as temporary:
        ...         _ = temporary.write_text("whole")
        ...     target.read_text(), len(list(Path(folder).iterdir()))
        ('whole', 1)
    """
    path = path.resolve() if path.is_dir() else path  # a link to a folder stays a link
    temporary = path.parent / f"{_MARK}{os.getpid()}-{path.name}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        settle(path)
        _sweep(path.parent, f"-{path.name}")
        yield temporary
        if temporary.is_dir() and path.is_dir():
            _replace_folder(temporary, path)
        else:
            os.replace(temporary, path)
    except PosswapError:
        raise
    except Exception as error:
        if not _is_about_writing(error):
            raise
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot write {path}: {reason}. Free some space or choose another folder.") from error
    finally:
        _remove(temporary)


def settle(path: Path) -> None:
    """Put the folder `path` back where a process was killed while replacing it, on a system that cannot do so at once.

    Raises:
        CheckpointError: it cannot be put back.
    """
    aside = path.parent / f"{_ASIDE}{path.name}"
    if not aside.is_dir():
        return
    try:
        if path.exists():  # the successor came: only the removal was missed
            shutil.rmtree(aside)
        else:
            os.rename(aside, path)
    except OSError as error:
        raise CheckpointError(
            f"saving {path} was interrupted, and {aside}, which holds it, cannot take its place back: "
            f"{error.strerror or error}. Rename it by hand."
        ) from error


def _replace_folder(new: Path, path: Path) -> None:
    """Let the folder `new` take the place of the folder `path`; what was there goes."""
    if _exchange(new, path):
        shutil.rmtree(new)
        return
    aside = path.parent / f"{_ASIDE}{path.name}"
    os.rename(path, aside)
    os.rename(new, path)
    shutil.rmtree(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change places at once, and return whether the system can do that."""
    system: Any = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
    names = os.fsencode(one), os.fsencode(other)
    if sys.platform == "linux" and hasattr(system, "renameat2"):
        failed = system.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
    elif sys.platform == "darwin" and hasattr(system, "renamex_np"):
        failed = system.renamex_np(*names, _RENAME_SWAP)
    else:
        return False
    code = ctypes.get_errno()
    if failed and code not in _NOT_THERE:
        raise OSError(code, os.strerror(code), str(other))
    return not failed


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all.

    Raises:
        CheckpointError: as `replacing`.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as indented JSON, whole or not at all; NaN and infinity are refused.

    Raises:
        CheckpointError: as `replacing`.
        ValueError: `value` holds NaN or infinity, which JSON does not have.
    """
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Return the JSON value in `path`.

    Raises:
        CheckpointError: the file is missing, unreadable or no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}. Delete it to have it made again.") from error


def writable_folder(path: Path) -> Path:
    """Make the folder `path` where it is missing, prove by a small file that it can be written, and return it.

    Temporaries that a killed process of this package left in it are removed.

    Raises:
        CheckpointError: it is no folder, or cannot be made or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=_MARK) as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
    except OSError as error:
        raise CheckpointError(
            f"cannot write to the folder {path}: {error.strerror or error}. Choose another."
        ) from error
    for folder in [path, *(below for below in path.rglob("*") if below.is_dir())]:
        _sweep(folder)
    return path


def cache_folder(chosen: Path | None) -> Path:
    """Return where what is made once is kept: `chosen`, $HF_POSSWAP_CACHE, or the user's cache folder."""
    if chosen is not None:
        return chosen
    if named := os.environ.get("HF_POSSWAP_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_posswap"


def _sweep(folder: Path, ending: str = "") -> None:
    """Remove the temporaries in `folder` whose names have that ending and whose processes are gone."""
    for leftover in folder.iterdir() if folder.is_dir() else ():
        if leftover.name.startswith(_MARK) and leftover.name.endswith(ending) and not _alive(leftover.name):
            _remove(leftover)


def _alive(name: str) -> bool:
    """Return whether the process that a temporary is named after still runs."""
    owner = name.removeprefix(_MARK).split("-")[0]
    if not owner.isdigit() or int(owner) == os.getpid():
        return False
    try:
        os.kill(int(owner), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _is_about_writing(error: Exception) -> bool:
    """Return whether `error` says that a file could not be written: safetensors and torch have their own ways to."""
    return isinstance(error, OSError) or any(said in str(error) for said in _SAID_BY_WRITERS)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):  # never made, or in a place where nothing can be: another error says so
            path.unlink()
