"""Digests: of JSON lines and arrays, so that what was damaged is not believed, of a model's weights, and of code."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_posswap.utils.atomic_io import replacing

_FIELD = "sha256"


def json_digest(value: object) -> str:
    """Return the SHA-256 of `value`, JSON, whatever the order of its names.

    Raises:
        TypeError, ValueError, RecursionError: it is not valid JSON.

    Example:
        >>> json_digest({"a": 1, "b": 2}) == json_digest({"b": 2, "a": 1})
        True
    """
    text = json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def code_digests(modules: Iterable[str]) -> dict[str, str]:
    """Return a digest of the source file of each of `modules`, which are imported, by their names.

    Of a module without a file, such as a notebook, it is equal to no other: what was computed with it is not reused.

    Example:
        >>> code_digests(["json"]) == code_digests(["json"]), code_digests(["sys"]) == code_digests(["sys"])
        (True, False)
    """
    digests = {}
    for name in modules:
        path = Path(getattr(sys.modules.get(name), "__file__", None) or "")
        code = path.read_bytes() if path.is_file() else uuid.uuid4().bytes
        digests[name] = hashlib.sha256(code).hexdigest()[:16]
    return digests


def append_line(path: Path, entry: dict[str, object]) -> None:
    """Write `entry` and its digest as one line to the end of `path` and to the disk: all of it, or nothing.

    A whole line stays if Ctrl-C comes while the disk takes it, because minutes of work may be in it.

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
        except BaseException as error:
            if len(rest) or isinstance(error, OSError):
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
    sync_to_disk(path.parent)
    return hashlib.sha256(content).hexdigest()


def sync_to_disk(path: Path) -> None:
    """Have `path`, a file or a folder's entries, written to the disk; not a folder on Windows, which opens none.

    Raises:
        OSError: it cannot be opened or written.
    """
    if os.name != "posix" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)  # Windows syncs what is open to write
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_array(path: Path, digest: str) -> np.ndarray | None:
    """Return the array in `path`, if its file has that SHA-256; None where it was deleted, damaged or replaced."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    intact = hashlib.sha256(content).hexdigest() == digest
    return np.load(io.BytesIO(content), allow_pickle=False) if intact else None


def weights_digest(model: nn.Module) -> str:
    """Return a digest of every byte of every weight and persistent buffer of `model`, with names, dtypes and shapes.

    A sample would be quicker, and blind where it matters: one row of an embedding, one expert of many. All of it takes
    about a second a GB and core, once, before hours of work; and what is in memory is what is worked on, whether it
    came from a folder, the Hub's newest commit, or an adapter on another base.

    Example:
        >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> before = weights_digest(one)
        >>> before == weights_digest(one), before == weights_digest(other)
        (True, False)
    """
    return state_digest(model.state_dict())


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Return the digest that `weights_digest` returns of a model with this state dict."""
    whole = hashlib.sha256()
    with ThreadPoolExecutor() as threads:
        for (name, tensor), digest in zip(state.items(), threads.map(_digest, state.values()), strict=True):
            whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {digest}\n".encode())
    return whole.hexdigest()[:16]


def _digest(tensor: Tensor) -> str:
    whole = hashlib.sha256()
    for plain in plain_parts(tensor):
        whole.update(plain.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that hold the numbers of `tensor`: itself, or those that a quantized one is made of.

    Example:
        >>> len(plain_parts(torch.zeros(2)))
        1
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [plain for name in names for plain in plain_parts(getattr(tensor, name))]
