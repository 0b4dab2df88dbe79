"""The manifest of a saved checkpoint: the files that a save wrote, each with its SHA-256.

With it, `overwrite=True` tells what a save wrote from what the user added or edited. The whole content is hashed, that
of weights too, so that no edit goes unseen.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_posswap.errors import CheckpointError
from hf_posswap.utils.atomic_io import read_json, write_json

MANIFEST = "posswap_files.json"
_VERSION = 1
State = dict[str, tuple[int, ...]]
"""Of a folder (under "") and each entry in it: what changes whenever the entry does."""


def write_manifest(folder: Path) -> None:
    """List all files in `folder`, which one save has written and nobody reads yet, in its manifest."""
    files = {name: _fingerprint(Path(entry.path)) for name, entry in sorted(walk(folder)) if name != MANIFEST}
    (folder / MANIFEST).write_text(json.dumps({"version": _VERSION, "files": files}, indent=2) + "\n", encoding="utf-8")


def write_listed_json(path: Path, value: Any) -> None:
    """Write `value` to `path` in a saved checkpoint as JSON, and keep the manifest true to it.

    A file that was edited since it was saved, or was never listed, does not become one that a save wrote.
    """
    files = read_manifest(path.parent)
    is_saved = files is not None and path.is_file() and files.get(path.name) == _fingerprint(path)
    write_json(path, value)
    if is_saved:
        assert files is not None
        write_json(path.parent / MANIFEST, {"version": _VERSION, "files": files | {path.name: _fingerprint(path)}})


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the files that the manifest in `folder` lists, with their fingerprints; None: there is no manifest.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return None
    problem = "it is no regular file"
    if path.is_file() and not path.is_symlink():
        try:
            content = read_json(path)
        except CheckpointError as error:
            content, problem = None, str(error.__cause__)
        else:
            problem = "it must hold an object with version 1 and files"
        if isinstance(content, dict) and content.get("version") == _VERSION and isinstance(content.get("files"), dict):
            files: dict[str, Any] = content["files"]
            return files
    raise CheckpointError(
        f"{path} does not tell which files a save wrote: {problem}. Choose another folder, or move what you need out "
        "of this one and delete it."
    )


def unsaved_entries(folder: Path, files: dict[str, Any]) -> dict[str, str]:
    """Return the entries of `folder` that are not as a save wrote them: name and why.

    Args:
        folder: of a checkpoint.
        files: that its manifest lists.
    """
    problems = {name: _problem(entry, files.get(name)) for name, entry in sorted(walk(folder)) if name != MANIFEST}
    return {name: problem for name, problem in problems.items() if problem is not None}


def _problem(entry: os.DirEntry[str], listed: Any) -> str | None:
    problem = irregularity(entry)
    if problem is None and listed is None:
        problem = "not written by a save"
    if problem is not None:
        return problem
    try:
        size = entry.stat(follow_symlinks=False).st_size
        is_equal = isinstance(listed, dict) and size == listed.get("size") and _fingerprint(Path(entry.path)) == listed
    except FileNotFoundError:
        raise
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if is_equal else "changed since it was saved"


def irregularity(entry: os.DirEntry[str]) -> str | None:
    """Return what makes `entry` something that no save writes; None: it is a regular file."""
    if entry.is_symlink():
        return "a symbolic link"
    if entry.is_dir(follow_symlinks=False):
        return "a folder that is empty or cannot be read"
    return None if entry.is_file(follow_symlinks=False) else "no regular file"


def walk(folder: Path, prefix: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Give the entries below `folder` with their paths in it; of folders only those in which nothing can be seen.

    Links are entries, and not followed.

    Raises:
        OSError: `folder` itself cannot be read.
    """
    with os.scandir(folder) as entries:
        children = list(entries)
    for entry in children:
        name = f"{prefix}{entry.name}"
        if not entry.is_dir(follow_symlinks=False):
            yield name, entry
            continue
        try:
            inside = list(walk(Path(entry.path), f"{name}/"))
        except FileNotFoundError:
            raise
        except OSError:
            inside = []
        yield from inside or [(name, entry)]


def state_of(folder: Path) -> State:
    """Return the state of `folder`: another one means that something in it has changed. {}: there is no folder."""
    try:
        seen = {name: entry.stat(follow_symlinks=False) for name, entry in walk(folder)}
        seen[""] = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {
        name: (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        for name, status in seen.items()
    }


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
