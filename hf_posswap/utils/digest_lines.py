"""Lines of JSON and arrays that carry the SHA-256 of what was written, so that what was damaged is not believed."""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from hf_posswap.utils.atomic_io import replacing

_FIELD = "sha256"


def json_digest(value: Any) -> str:
    """Return the SHA-256 of `value`, JSON, whatever the order of its names.

    Raises:
        TypeError, ValueError, RecursionError: it is no JSON.

    Example:
        >>> json_digest({"a": 1, "b": 2}) == json_digest({"b": 2, "a": 1})
        True
    """
    text = json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def append_line(path: Path, entry: dict[str, Any]) -> None:
    """Write `entry` and its digest as one line to the end of `path` and to the disk: all of it, or nothing.

    Raises:
        OSError: it cannot be written.
    """
    line = (json.dumps(entry | {_FIELD: json_digest(entry)}, allow_nan=False) + "\n").encode()
    with path.open("ab", buffering=0) as file:
        start, rest = file.tell(), memoryview(line)
        try:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except BaseException:
            os.truncate(path, start)
            raise


def read_line(line: bytes) -> dict[str, Any]:
    """Return the entry that `append_line` wrote.

    Raises:
        KeyError, TypeError, ValueError, RecursionError: it wrote something else.
    """
    entry = json.loads(line)
    if not isinstance(entry, dict):
        raise TypeError(f"it is a {type(entry).__name__}")
    digest = entry.pop(_FIELD)
    if json_digest(entry) != digest:
        raise ValueError("it was changed after it was written")
    return entry


def write_array(path: Path, value: np.ndarray) -> str:
    """Write an array to `path` and to the disk, whole or not at all, and return the SHA-256 of the file.

    Raises:
        CheckpointError: it cannot be written.
    """
    buffer = io.BytesIO()
    np.save(buffer, value, allow_pickle=False)
    content = buffer.getvalue()
    with replacing(path, tidy=False) as temporary, temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return hashlib.sha256(content).hexdigest()


def read_array(path: Path, digest: str) -> np.ndarray | None:
    """Return the array in `path`, if its file has that SHA-256; None where it was deleted, damaged or replaced."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    intact = hashlib.sha256(content).hexdigest() == digest
    return np.load(io.BytesIO(content), allow_pickle=False) if intact else None
