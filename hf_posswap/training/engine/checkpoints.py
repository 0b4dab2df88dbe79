"""Checkpoints to resume from: sealed when complete, skipped with a warning when not; the newest few are kept."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

from hf_posswap.errors import CheckpointError, TrainingWarning
from hf_posswap.utils.atomic_io import read_json, read_object, write_json

SEAL = "posswap-checkpoint.json"
UNFINISHED = ".unfinished"
"""Folder next to the checkpoints in which all processes write the next one."""
_NAME = re.compile(r"checkpoint-(\d+)")


def seal(folder: Path, step: int, identity: dict[str, Any]) -> None:
    """Sync the files in `folder` to disk, and write the digests of a complete checkpoint.

    Code bundled with the model is left out: resuming does not need it.

    Args:
        folder: a written checkpoint.
        step: optimizer steps done.
        identity: of its training.
    """
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".py"):
        _fsync(path)
        files[str(path.relative_to(folder))] = _digest(path)
    write_json(folder / SEAL, {"version": 1, "step": step, "identity": identity, "files": files})
    _fsync(folder / SEAL)
    _fsync(folder)


def take_place(unfinished: Path, target: Path) -> None:
    """Move a sealed checkpoint to its final name, replacing one of an earlier run."""
    if target.exists():
        shutil.rmtree(target)
    os.replace(unfinished, target)
    unfinished.parent.rmdir()
    _fsync(target.parent)


def rotate(folder: Path, keep: int | None) -> None:
    """Remove all but the newest `keep` checkpoints in `folder`; None: keep all."""
    if keep is None:
        return
    for path in checkpoints_in(folder)[keep:]:
        (path / SEAL).unlink(missing_ok=True)  # an interrupted removal leaves no valid checkpoint
        shutil.rmtree(path)


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, complete or not, the newest first."""
    checkpoints = [path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(checkpoints, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step of `checkpoint`.

    Example:
        >>> step_of(Path("run/checkpoints/checkpoint-300"))
        300
    """
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise CheckpointError(f"{checkpoint} is not a training checkpoint: expected a name like checkpoint-100.")
    return int(match.group(1))


def newest(folder: Path, identity: dict[str, Any]) -> Path | None:
    """Return the newest complete checkpoint in `folder`, or None. Incomplete ones are skipped with a warning.

    Args:
        folder: of the checkpoints.
        identity: of the training to resume.

    Raises:
        CheckpointError: it belongs to another training.
    """
    for path in checkpoints_in(folder):
        problem = problem_of(path)
        if problem is None:
            _refuse_other_training(path, identity)
            return path
        warnings.warn(f"{path} is incomplete ({problem}): it is skipped.", TrainingWarning, stacklevel=2)
    return None


def problem_of(checkpoint: Path) -> str | None:
    """Return what is missing or damaged in `checkpoint`, or None."""
    try:
        files = read_object(checkpoint / SEAL, files=dict, identity=dict)["files"]
    except CheckpointError:
        return f"no readable {SEAL}"
    for name, digest in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if _digest(path) != digest:
            return f"{name} is damaged"
    return None


def _refuse_other_training(checkpoint: Path, identity: dict[str, Any]) -> None:
    saved_identity = read_json(checkpoint / SEAL)["identity"]
    changes = [f"{key}: {old!r}, now {new!r}" for key, old, new in differences(saved_identity, identity)]
    if changes:
        raise CheckpointError(
            f"{checkpoint} belongs to another training ({'; '.join(changes)}). Undo these changes, choose another "
            "folder (out), or delete the checkpoints to start over."
        )


def differences(old: Any, new: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """Return the differences of two JSON values: key, old, new.

    Example:
        >>> differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}})
        [('a.c', 2, 3)]
    """
    if isinstance(old, dict) and isinstance(new, dict):
        keys = list(dict.fromkeys([*old, *new]))
        nested_differences = [
            differences(old.get(name), new.get(name), f"{key}.{name}" if key else name) for name in keys
        ]
        return [difference for nested in nested_differences for difference in nested]
    return [] if old == new else [(key, old, new)]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    """Sync `path`, a file or a folder's entries, to disk."""
    if os.name != "posix" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
