"""Writing files and folders so that a reader finds the old content or the new one, never half of it.

A folder changes places with its successor in one system call where the system has one (Linux, macOS). Elsewhere the old
one steps aside first, into the staging folder of its successor: whoever reads or writes the folder next puts it back if
its successor never came.

A staging folder belongs to the call that made it for as long as that holds the lock in it; the system lets go of the
lock when the process ends, however it ends. So nobody has to guess from a number whether a writer still lives: not
for threads, nor for containers that share a folder, nor after a process id was given away again. It holds the lock,
`new/NAME` (what is made) and, where a folder cannot be exchanged at once, `old/NAME` (what stepped aside for it). The
next writer removes what killed processes left.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.utils.printable import printable
from hf_posswap.utils.untrusted import MOST_BYTES, read_bounded_json
from hf_posswap.utils.user_paths import expand_home

MARK = ".posswap-partial-"
"""How the names of staging folders begin."""
NEW, OLD = "new", "old"
_LOCK = "writer.lock"
_LOCK_TRIES = 10
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # Linux: fcntl.h, fs.h
_RENAME_SWAP = 2  # macOS: stdio.h
_NOT_THERE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)  # the system or the file system has it not
_OVERTAKEN = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST)  # another writer made or moved the place meanwhile
_OTHER_MOUNT = (errno.EBUSY, errno.EXDEV)
_MOUNTED = (
    "It is a mount point, or comes from a read-only layer below its file system, and cannot be replaced as a whole: "
    "choose a new folder or file."
)
_SAID_BY_WRITERS = ("os error", "inline_container", "PytorchStreamWriter")  # safetensors; torch.save, twice
_ERROR_NUMBER = re.compile(r"\(os error (\d+)\)")  # safetensors
_TRIES = 100


@contextmanager
def replacing(path: Path, *, tidy: bool = True) -> Iterator[Path]:
    """Give a temporary path, a file or a folder to make; at the end it takes the place of `path`.

    It has the name of `path` and lies in a temporary folder next to it, one for each call: of several processes or
    threads that write one path, each writes a whole file, and the last one stays. Whatever ends the block early,
    Ctrl-C included, removes the temporary and leaves `path` unchanged. A killed process leaves the old or the new
    `path`, complete; the next writer in the folder removes its leftovers.

    Args:
        path: to replace, or to make with its parents.
        tidy: remove leftovers of killed writers next to it. False: where many files are written into one folder, and
            `writable_folder` has looked before.

    Raises:
        CheckpointError: the place cannot be written or the disk is full.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     target = Path(folder) / "a.txt"
        ...     with replacing(target) as temporary:
        ...         _ = temporary.write_text("whole")
        ...     target.read_text(), len(list(Path(folder).iterdir()))
        ('whole', 1)
    """
    try:
        path = path.resolve() if path.is_dir() else path  # a link to a folder stays a link
        path.parent.mkdir(parents=True, exist_ok=True)
        if tidy:
            sweep(path.parent)
        with staging_folder(path.parent) as staging:
            (staging / NEW).mkdir()
            yield staging / NEW / path.name
            _take_place(staging / NEW / path.name, path, staging / OLD)
    except PosswapError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and not any(phrase in str(error) for phrase in _SAID_BY_WRITERS):
            raise  # it is not about writing
        raise CheckpointError(f"cannot write {shown(path)}: {_reason_and_advice(error, path.parent)}") from error


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Give a new folder among the temporary files of the system; at the end it is removed, with what is in it.

    What killed processes of this user left in such folders is removed first. A system that clears its temporary files
    by itself is not a replacement: what lies there is as large as a model.

    Raises:
        CheckpointError: no folder of temporary files can be written; or, from the block, the disk is full.

    Example:
        >>> with scratch_folder() as folder:
        ...     _ = (folder / "a.txt").write_text("for now")
        >>> folder.exists()
        False
    """
    with ExitStack() as stack:
        try:
            parent = Path(tempfile.gettempdir())
            sweep(parent, own=True)
            folder = stack.enter_context(staging_folder(parent))
        except OSError as error:
            raise CheckpointError(
                f"no temporary folder can be made: {error.strerror or error}. Free some space, or set TMPDIR to a "
                "folder that can be written."
            ) from error
        try:
            yield folder
        except CheckpointError as error:
            if type(error) is not CheckpointError or str(folder) not in str(error):
                raise
            raise CheckpointError(f"{error} It lies among the temporary files: TMPDIR chooses where.") from error


def settle(path: Path) -> None:
    """Put the folder `path` back where a process was killed while replacing it, on a system that cannot do so at once.

    Raises:
        CheckpointError: it cannot be put back.
    """
    try:
        if not path.exists():
            put_back(path)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # so it was never made
            return
        raise CheckpointError(
            f"saving {path} was interrupted, and {error.filename}, which holds it, cannot be renamed back: "
            f"{error.strerror or error}. Rename it yourself."
        ) from error


def _take_place(new: Path, path: Path, aside: Path) -> None:
    """Let the file or folder `new` take the place of `path`; a folder that was there goes into `aside` or to `new`."""
    for attempt in range(_TRIES):
        try:
            if not (new.is_dir() and path.is_dir()):
                os.replace(new, path)
            elif not _exchange(new, path):
                aside.mkdir(exist_ok=True)
                shutil.rmtree(aside / path.name, ignore_errors=True)  # of an earlier one that was overtaken
                os.rename(path, aside / path.name)
                os.rename(new, path)
            return
        except OSError as error:
            if error.errno not in _OVERTAKEN or not os.path.lexists(new) or attempt == _TRIES - 1:
                raise


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two folders atomically, and return whether the system supports that."""
    system: object = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
    names = os.fsencode(first), os.fsencode(second)
    if sys.platform == "linux" and hasattr(system, "renameat2"):
        failed = system.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
    elif sys.platform == "darwin" and hasattr(system, "renamex_np"):
        failed = system.renamex_np(*names, _RENAME_SWAP)
    else:
        return False
    code = ctypes.get_errno()
    if failed and code not in _NOT_THERE:
        raise OSError(code, os.strerror(code), str(second))
    return not failed


def shown(path: Path) -> str:
    """Return `path` to be put into a message, in one line: of one that is too long to be made, its beginning.

    Example:
        >>> shown(Path("a/b")), len(shown(Path("a" * 5000)))
        ('a/b', 203)
    """
    text = printable(path)
    return text if len(text) <= 1024 else f"{text[:200]}..."


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all.

    Raises:
        CheckpointError: as `replacing`.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Write `value` to `path` as indented JSON, whole or not at all; NaN and infinity are refused.

    Raises:
        CheckpointError: as `replacing`.
        ValueError: `value` holds NaN or infinity, which JSON does not have.
    """
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path, most: int = MOST_BYTES) -> Any:
    """Return the JSON value in `path`, a regular file of at most `most` bytes.

    Raises:
        CheckpointError: the file is missing, unreadable, not JSON, or too large or deep.
    """
    try:
        return read_bounded_json(path, most)
    except FileNotFoundError as error:
        raise CheckpointError(f"cannot read {shown(path)}: there is no such file; give the path of one.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot read {shown(path)}: {error}. Delete it to have it made again if a command made it, or correct it."
        ) from error


def read_object(path: Path, **fields: type) -> dict[str, Any]:
    """Return the JSON object in `path`, which has `fields`, each of its type.

    Raises:
        CheckpointError: as `read_json`, or the file holds something else.
    """
    content = read_json(path)
    if not isinstance(content, dict) or not all(
        isinstance(content.get(name), field_type) for name, field_type in fields.items()
    ):
        raise CheckpointError(
            f"{shown(path)} must hold a JSON object with {', '.join(fields)}: it is damaged. Delete it to have it made "
            "again."
        )
    return content


def object_or_empty(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; {} where there is none that can be read."""
    try:
        return read_object(path)
    except CheckpointError:
        return {}


def _reason_and_advice(error: BaseException, path: Path) -> str:
    """Return why nothing can be written in `path` and what to do: space helps only where there is too little."""
    match = _ERROR_NUMBER.search(str(error))
    number = int(match[1]) if match else getattr(error, "errno", None)
    if number in _OTHER_MOUNT:
        advice = _MOUNTED
    elif number == errno.EFBIG:
        advice = "Free some space, raise the limit on the size of files (ulimit -f), or choose another folder."
    elif number in (None, errno.ENOSPC, errno.EDQUOT):  # torch.save names no number
        advice = "Free some space or choose another folder."
    else:
        advice = "Choose another folder."
    if isinstance(error, FileExistsError | NotADirectoryError):
        there = next((each for each in (path, *path.parents) if os.path.lexists(each)), path)
        if not there.is_dir():
            return f"{shown(there)} is not a folder. {advice}"
    return f"{getattr(error, 'strerror', None) or str(error).partition(chr(10))[0]}. {advice}"


def writable_folder(path: Path, file: Path | None = None) -> Path:
    """Make the folder `path` where it is missing, prove by a small file that it can be written, and return it.

    What killed processes of this package left in it is removed; what lies deeper is left to whoever writes there.

    Args:
        path: the folder.
        file: the file to be written there, which an error names where the folder itself is not to blame.

    Raises:
        CheckpointError: it is not a folder, or cannot be made or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        sweep(path)
        with staging_folder(path) as staging:
            (staging / "probe").write_bytes(bytes(4096))
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        target = f"to the folder {shown(path)}" if file is None or not is_full else shown(file)
        raise CheckpointError(f"cannot write {target}: {_reason_and_advice(error, path)}") from error
    return path


@contextmanager
def alone_in(folder: Path, activity: str, lock: str = ".lock") -> Iterator[None]:
    """Lock `folder` inside the block; the system releases the lock when the process ends, however it ends.

    Args:
        folder: an existing folder.
        activity: what writes to it, for the error: "training".
        lock: name of the file that is locked.

    Raises:
        CheckpointError: another process holds it.
    """
    file_lock = FileLock(folder / lock, timeout=0, thread_local=False)
    try:
        file_lock.acquire()
    except Timeout as error:
        raise CheckpointError(f"another {activity} writes to {folder}: wait for it, or choose another out.") from error
    try:
        yield
    finally:
        file_lock.release()


def check_new_file(path: Path) -> None:
    """Raise a CheckpointError where `path` is there already, or what would be its folder is a file."""
    if os.path.lexists(path):
        raise CheckpointError(f"{path} already exists: give a new file name.")
    there = next(each for each in path.absolute().parents if os.path.lexists(each))
    if not there.is_dir():
        raise CheckpointError(f"cannot write {shown(path)}: {shown(there)} is not a folder. Choose another folder.")


def check_room(path: Path, size: int) -> None:
    """Raise a CheckpointError where a file of `size` bytes does not fit on the disk of `path`.

    For writers that abort the process on a full disk, as torch.save does.
    """
    existing_folder = next(folder for folder in path.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(existing_folder).free
    if size > free:
        raise CheckpointError(
            f"cannot write {shown(path)}: it takes {size / 2**20:.1f} MiB, and {free / 2**20:.1f} MiB are free. Free "
            "some space or choose another folder."
        )


def cache_folder(chosen: Path | None) -> Path:
    """Return where what is made once is kept: `chosen`, $HF_POSSWAP_CACHE, or the user's cache folder.

    Raises:
        CheckpointError: the user has none.
    """
    if chosen is not None:
        return expand_home(chosen)
    if named := os.environ.get("HF_POSSWAP_CACHE"):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_posswap"
    except RuntimeError as error:
        raise CheckpointError(
            "there is no folder to keep caches in: HOME is not set, and this user has no home. Set HF_POSSWAP_CACHE "
            "to a folder that can be written."
        ) from error


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
            shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            lock.release(force=True)
        with suppress(OSError):  # where a file that is open cannot be removed, the lock is left
            if folder.is_dir() and not any((folder / OLD).glob("*")):
                shutil.rmtree(folder, ignore_errors=True)


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
                shutil.rmtree(folder, ignore_errors=True)


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
    for _ in range(_LOCK_TRIES):
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
