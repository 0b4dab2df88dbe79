"""Checkpoints to go on from: complete and proved so, or skipped with a warning; the newest few are kept."""

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
"""Folder beside the checkpoints in which the next one is written, by all processes of a run."""
_NAME = re.compile(r"checkpoint-(\d+)")


def seal(folder: Path, step: int, identity: dict[str, Any]) -> None:
    """Bring the files in `folder` to the disk, and write down what a whole checkpoint holds.

    Code that is bundled with the model is left out: a training does not go on from it.

    Args:
        folder: a checkpoint that has been written.
        step: optimizer steps done.
        identity: of the training that it belongs to.
    """
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".py"):
        _to_disk(path)
        files[str(path.relative_to(folder))] = _digest(path)
    write_json(folder / SEAL, {"version": 1, "step": step, "identity": identity, "files": files})
    _to_disk(folder / SEAL)
    _to_disk(folder)


def take_place(unfinished: Path, target: Path) -> None:
    """Give a sealed checkpoint its name; one of that name, of an earlier run, goes."""
    if target.exists():
        shutil.rmtree(target)
    os.replace(unfinished, target)
    unfinished.parent.rmdir()
    _to_disk(target.parent)


def rotate(folder: Path, keep: int | None) -> None:
    """Remove all but the newest `keep` checkpoints in `folder`; None: none is removed."""
    if keep is None:
        return
    for path in checkpoints_in(folder)[keep:]:
        (path / SEAL).unlink(missing_ok=True)  # a removal that is cut off leaves no checkpoint behind
        shutil.rmtree(path)


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, the newest first, whole or not."""
    found = [path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Return the optimizer steps after which `checkpoint` was written.

    Example:
        >>> step_of(Path("run/checkpoints/checkpoint-300"))
        300
    """
    named = _NAME.fullmatch(checkpoint.name)
    if named is None:
        raise CheckpointError(f"{checkpoint} is no checkpoint of a training: expected a name like checkpoint-100.")
    return int(named.group(1))


def newest(folder: Path, identity: dict[str, Any]) -> Path | None:
    """Return the newest whole checkpoint in `folder`; None where there is none. Torn ones are skipped with a warning.

    Args:
        folder: of the checkpoints.
        identity: of the training that is to go on.

    Raises:
        CheckpointError: it belongs to another training.
    """
    for path in checkpoints_in(folder):
        problem = problem_of(path)
        if problem is None:
            _refuse_another(path, identity)
            return path
        warnings.warn(f"{path} is not whole ({problem}): it is skipped.", TrainingWarning, stacklevel=2)
    return None


def problem_of(checkpoint: Path) -> str | None:
    """Return what is missing or damaged in `checkpoint`; None: it is whole."""
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


def _refuse_another(checkpoint: Path, identity: dict[str, Any]) -> None:
    held = read_json(checkpoint / SEAL)["identity"]
    changes = [f"{key}: {was!r}, now {now!r}" for key, was, now in differences(held, identity)]
    if changes:
        raise CheckpointError(
            f"{checkpoint} belongs to another training ({'; '.join(changes)}). Take that back, choose another folder "
            "(out), or delete the checkpoints to begin anew."
        )


def differences(old: Any, new: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """Return where two JSON values differ: key, old, new.

    Example:
        >>> differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}})
        [('a.c', 2, 3)]
    """
    if isinstance(old, dict) and isinstance(new, dict):
        keys = list(dict.fromkeys([*old, *new]))
        parts = [differences(old.get(name), new.get(name), f"{key}.{name}" if key else name) for name in keys]
        return [found for part in parts for found in part]
    return [] if old == new else [(key, old, new)]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(path: Path) -> None:
    """Have the system write `path`, a file or a folder's entries, to the disk."""
    if os.name != "posix" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
