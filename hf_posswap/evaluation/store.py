"""Stored results, unit by unit: a killed run resumes where it stopped, and ends with bit-identical results.

A unit is one document, one prompt, one cell. Its key is a hash of everything that its value depends on; its value is
appended to `per_doc.jsonl` as one line and synced to disk before the next unit starts. Arrays are in `nll/`, one file
per unit, renamed into place before their line is written. A torn last line of a killed run is truncated at the next
opening. Each line has the SHA-256 of its content and of its array: a changed line is refused, and a unit whose array
was changed or deleted is measured again. Processes that share the units write one file each, `per_doc.1.jsonl` and so
on; the next opening reads all files, whatever the number of processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from filelock import FileLock, Timeout

from hf_posswap.errors import CheckpointError, DataError
from hf_posswap.utils.atomic_io import writable_folder
from hf_posswap.utils.digests import append_line, json_digest, read_array, read_line, write_array

LINES, ARRAYS, LOCK = "per_doc.jsonl", "nll", ".lock"
Value = dict[str, Any] | np.ndarray


def unit_key(unit: Mapping[str, object]) -> str:
    """Return a hash of 32 hex digits of `unit`, a JSON object, independent of the order of its keys.

    Raises:
        DataError: the unit is not JSON data.

    Example:
        >>> unit_key({"length": 8, "document": "a"}) == unit_key({"document": "a", "length": 8})
        True
    """
    try:
        return json_digest(dict(unit))[:32]
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"a unit is named by JSON, got {dict(unit)!r}: {error}.") from error


def units_in(folder: Path) -> int:
    """Return the number of units whose lines are in `folder`, without a torn last one.

    Example:
        >>> units_in(Path("no such folder"))
        0
    """
    return sum(path.read_bytes().count(b"\n") for path in folder.glob(f"{Path(LINES).stem}*{Path(LINES).suffix}"))


class RunStore:
    """Stores the values of units in a folder, or only in memory.

    One run at a time: the folder is locked until `close`, the end of a with block, or the end of the process.

    Args:
        folder: created if missing; None: nothing is written.
        part: index of this process among those that share the units. Part 0 is opened first, and refuses a folder in
            which any part is still open; each part writes a separate file.

    Raises:
        CheckpointError: the folder cannot be written, another process uses it, or a line in it is not a unit.

    Example:
        >>> with RunStore(None) as store:
        ...     store.value({"document": "a"}, lambda: {"nll": 2.5}), store.value({"document": "a"}, lambda: {})
        ({'nll': 2.5}, {'nll': 2.5})
    """

    def __init__(self, folder: Path | None, part: int = 0) -> None:
        self.folder, self.part = folder, part
        self.computed = 0
        """Number of units computed since the opening."""
        self._values: dict[str, Value] = {}
        self._lock = None if folder is None else _locked(folder, part)
        if folder is not None:
            try:
                path = Path(LINES)
                for lines in sorted(folder.glob(f"{path.stem}*{path.suffix}")):
                    self._values |= _read_lines(lines, repair=part == 0)
            except BaseException:
                self.close()
                raise

    def holds(self, unit: Mapping[str, object]) -> bool:
        """Return whether the value of `unit` is stored."""
        return unit_key(unit) in self._values

    def value(self, unit: Mapping[str, object], compute: Callable[[], Value]) -> Value:
        """Return the stored value of `unit`, or compute and store it.

        Args:
            unit: everything that the value depends on, as JSON data.
            compute: returns a JSON object or an array.

        Raises:
            CheckpointError: the value cannot be written; earlier values are kept.
            DataError: the value is not JSON data, for example NaN.
        """
        key = unit_key(unit)
        if key not in self._values:
            value = compute()
            self.computed += 1
            self._values[key] = _as_json(value)
            if self.folder is not None:
                self._keep(self.folder, key, unit, self._values[key])
        return self._values[key]

    def learn(self, unit: Mapping[str, object], value: Value) -> None:
        """Add the value of `unit` that another process has computed and stored."""
        self._values.setdefault(unit_key(unit), value)

    def close(self) -> None:
        """Release the folder for other processes."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _keep(self, folder: Path, key: str, unit: Mapping[str, object], value: Value) -> None:
        try:
            stored = value
            if isinstance(value, np.ndarray):
                stored = {"array": write_array(_array_path(folder, key), value)}
            append_line(folder / _numbered(LINES, self.part), {"key": key, "unit": dict(unit), "value": stored})
        except OSError as error:
            del self._values[key]
            reason = getattr(error.__cause__, "strerror", None) or error.strerror or error
            raise CheckpointError(
                f"cannot write to {folder}: {reason}. Earlier measurements are kept: free some space and start again."
            ) from error


def _as_json(value: Value) -> Value:
    """Return `value` as it will be read back, so that a first run aggregates the same values as a resumed one."""
    if isinstance(value, np.ndarray):
        return value
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"a unit's value is JSON or an array, got {value!r}: {error}.") from error


def _numbered(name: str, part: int) -> str:
    """Return the name of a file for one of several processes; the first has no number.

    Example:
        >>> _numbered("per_doc.jsonl", 0), _numbered("per_doc.jsonl", 2), _numbered(".lock", 2)
        ('per_doc.jsonl', 'per_doc.2.jsonl', '.lock.2')
    """
    path = Path(name)
    return name if part == 0 else f"{path.stem}.{part}{path.suffix}"


def _locked(folder: Path, part: int) -> FileLock:
    """Acquire the lock of one part; for part 0 no other part may be open."""
    if part == 0:
        writable_folder(folder)
        if (folder / ARRAYS).is_dir():
            writable_folder(folder / ARRAYS)
        for other_lock in sorted(folder.glob(f"{LOCK}.*")):  # from a launch of which only the main process was killed
            _acquired(other_lock, folder).release()
    return _acquired(folder / _numbered(LOCK, part), folder)


def _acquired(path: Path, folder: Path) -> FileLock:
    lock = FileLock(path, thread_local=False)  # a store may be closed by another thread
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise CheckpointError(
            f"another process is writing to {folder}: wait until it ends, or give another folder."
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error.strerror or error}. Choose another.") from error
    return lock


def _read_lines(path: Path, *, repair: bool) -> dict[str, Value]:
    whole = path.read_bytes()
    end = whole.rfind(b"\n") + 1
    if end < len(whole) and repair:
        os.truncate(path, end)
    values: dict[str, Value] = {}
    for number, line in enumerate(whole[:end].splitlines(), 1):
        try:
            entry = read_line(line)
            key, value = entry["key"], entry["value"]
            if unit_key(entry["unit"]) != key:
                raise ValueError("its key does not belong to its unit")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(
                f"{path}, line {number} is damaged ({reason}): delete that line, or the file."
            ) from error
        stored = read_array(_array_path(path.parent, key), value["array"]) if set(value) == {"array"} else value
        if stored is not None:
            values[key] = stored
    return values


def _array_path(folder: Path, key: str) -> Path:
    return folder / ARRAYS / f"{key}.npy"
