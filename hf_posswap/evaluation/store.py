"""What was measured, kept unit by unit: a run that is killed goes on where it stopped, and ends with the same bits.

A unit is one document, one prompt, one cell. Its key is a hash of all that its value depends on; its value is appended
to `per_doc.jsonl` as one line and forced to the disk before the next unit begins. Arrays lie in `nll/`, one file a
unit, renamed into place before their line is written. A line that a kill tore in the middle is cut off at the next
opening. Each line carries the SHA-256 of what it says, that of its array included: a line that was changed is refused,
and a unit whose array was changed or deleted is measured again. Processes that measure together write a file each,
`per_doc.1.jsonl` and so on; all are read at the next opening, however many processes there are then.
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
from hf_posswap.utils.digest_lines import append_line, json_digest, read_array, read_line, write_array

LINES, ARRAYS, LOCK = "per_doc.jsonl", "nll", ".lock"
Value = dict[str, Any] | np.ndarray


def unit_key(unit: Mapping[str, Any]) -> str:
    """Return 32 hex digits that stand for `unit`, a JSON object, whatever the order of its names.

    Raises:
        DataError: it holds what JSON does not have.

    Example:
        >>> unit_key({"length": 8, "document": "a"}) == unit_key({"document": "a", "length": 8})
        True
    """
    try:
        return json_digest(dict(unit))[:32]
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"a unit is named by JSON, got {dict(unit)!r}: {error}.") from error


class RunStore:
    """Keeps the values of units in a folder, or in memory alone where none is given.

    One run at a time: the folder is locked until `close`, the end of a with block, or the end of the process.

    Args:
        folder: made where it is missing; None: nothing is written.
        part: of this process among those that measure together. Part 0 is opened first, and refuses a folder in which
            any part is still open; the others only read what it left, and write a file of their own.

    Raises:
        CheckpointError: the folder cannot be written, another process uses it, or a line in it is no unit.

    Example:
        >>> with RunStore(None) as store:
        ...     store.value({"document": "a"}, lambda: {"nll": 2.5}), store.value({"document": "a"}, lambda: {})
        ({'nll': 2.5}, {'nll': 2.5})
    """

    def __init__(self, folder: Path | None, part: int = 0) -> None:
        self.folder, self.part = folder, part
        self.computed = 0
        """Units that were computed since the opening, and not found."""
        self._values: dict[str, Value] = {}
        self._lock = None if folder is None else _locked(folder, part)
        if folder is not None:
            try:
                self._values = _read(folder, repair=part == 0)
            except BaseException:
                self.close()
                raise

    def holds(self, unit: Mapping[str, Any]) -> bool:
        """Return whether the value of `unit` is there already."""
        return unit_key(unit) in self._values

    def value(self, unit: Mapping[str, Any], compute: Callable[[], Value]) -> Value:
        """Return the value of `unit`: kept, or computed now and kept.

        Args:
            unit: all that the value depends on, as JSON.
            compute: gives a JSON object or an array.

        Raises:
            CheckpointError: the value cannot be written; what is there stays.
            DataError: the value holds what JSON does not have, such as NaN.
        """
        key = unit_key(unit)
        if key not in self._values:
            value = compute()
            self.computed += 1
            self._values[key] = _as_json(value)
            if self.folder is not None:
                self._keep(self.folder, key, unit, self._values[key])
        return self._values[key]

    def learn(self, unit: Mapping[str, Any], value: Value) -> None:
        """Take over the value of `unit` that another process computed, and keeps."""
        self._values.setdefault(unit_key(unit), value)

    def close(self) -> None:
        """Let other processes use the folder."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _keep(self, folder: Path, key: str, unit: Mapping[str, Any], value: Value) -> None:
        try:
            kept: Any = value
            if isinstance(value, np.ndarray):
                kept = {"array": write_array(_array_path(folder, key), value)}
            append_line(folder / _numbered(LINES, self.part), {"key": key, "unit": dict(unit), "value": kept})
        except OSError as error:
            del self._values[key]
            reason = getattr(error.__cause__, "strerror", None) or error.strerror or error
            raise CheckpointError(
                f"cannot write to {folder}: {reason}. What was measured before is kept: free some "
                "space and start again."
            ) from error


def _as_json(value: Value) -> Value:
    """Return `value` as it will be read back, so that a first run aggregates the same bits as a resumed one."""
    if isinstance(value, np.ndarray):
        return value
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"a unit's value is JSON or an array, got {value!r}: {error}.") from error


def _numbered(name: str, part: int) -> str:
    """Return the name of a file for one of several processes: that of the first has no number.

    Example:
        >>> _numbered("per_doc.jsonl", 0), _numbered("per_doc.jsonl", 2), _numbered(".lock", 2)
        ('per_doc.jsonl', 'per_doc.2.jsonl', '.lock.2')
    """
    path = Path(name)
    return name if part == 0 else f"{path.stem}.{part}{path.suffix}"


def _locked(folder: Path, part: int) -> FileLock:
    """Return the lock of one part, taken; that of part 0 only where no other part is open."""
    if part == 0:
        writable_folder(folder)
        if (folder / ARRAYS).is_dir():
            writable_folder(folder / ARRAYS)
        for left in sorted(folder.glob(f"{LOCK}.*")):  # of a launch whose main process alone was killed
            _acquired(left, folder).release()
    return _acquired(folder / _numbered(LOCK, part), folder)


def _acquired(path: Path, folder: Path) -> FileLock:
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise CheckpointError(
            f"another process is writing to {folder}: wait until it ends, or give another folder."
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error.strerror or error}. Choose another.") from error
    return lock


def _read(folder: Path, *, repair: bool) -> dict[str, Value]:
    """Return the values in `folder`, by key; `repair` cuts off what a kill left of a last line."""
    values: dict[str, Value] = {}
    path = Path(LINES)
    for lines in sorted(folder.glob(f"{path.stem}*{path.suffix}")):
        values |= _read_lines(lines, repair=repair)
    return values


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
            said = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(
                f"{path}, line {number} is damaged ({said}): delete that line, or the file."
            ) from error
        stored = read_array(_array_path(path.parent, key), value["array"]) if set(value) == {"array"} else value
        if stored is not None:
            values[key] = stored
    return values


def _array_path(folder: Path, key: str) -> Path:
    return folder / ARRAYS / f"{key}.npy"
