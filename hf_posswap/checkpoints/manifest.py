"""Which files of a checkpoint a save wrote, so that `overwrite=True` never deletes what the user added or edited.

A checkpoint of this package has a manifest of its files, each with its SHA-256. The whole content is hashed, that of
weights too, so that no edit goes unseen. In a checkpoint without one, of stock `save_pretrained` or an older version,
files that are not recognised count as the user's. So do files that a user may write or edit: code, and model cards,
except a card that is word for word PEFT's.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hf_posswap.checkpoints.adapters import ADAPTER_CONFIG
from hf_posswap.checkpoints.card import is_saved_readme
from hf_posswap.compat.transformers_loading import WEIGHTS, saved_names
from hf_posswap.errors import CheckpointError
from hf_posswap.patching.record.adapter_marks import SIDECAR
from hf_posswap.utils.atomic_io import object_or_empty, read_json, write_json, write_text
from hf_posswap.utils.untrusted import read_bounded

if TYPE_CHECKING:
    from collections.abc import Mapping

MANIFEST = "posswap_files.json"
_VERSION = 1
State = dict[str, tuple[int, ...]]
"""Of a folder (under "") and each entry in it: what changes whenever the entry does."""
CARD = "README.md"
_SHARD = re.compile(r"(model|pytorch_model)-\d{5,}-of-\d{5,}\.(safetensors|bin)")
_ADAPTER = (ADAPTER_CONFIG, "adapter_model.safetensors", "adapter_model.bin", SIDECAR)
_TEMPLATE = re.compile(r"additional_chat_templates/[^/]+\.jinja")
_SENTENCES = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")
_MODULE = re.compile(r"\d+_\w+")
_MODULE_FILES = ("config.json", "model.safetensors", "pytorch_model.bin")
_ENTRY = "modeling_posswap.py"
_BUNDLE = re.compile(r"^from \.(posswap_\w+) import ", re.MULTILINE)
_CARD_DATA = {"base_model", "library_name", "pipeline_tag", "tags"}
_PEFT_VERSIONS = re.compile(r"\n### Framework versions\s+(- PEFT \S+\s*)+$")


def write_manifest(folder: Path) -> None:
    """List all files in `folder`, which one save has written and nobody reads yet, in its manifest."""
    files = {name: _fingerprint(Path(entry.path)) for name, entry in sorted(walk(folder)) if name != MANIFEST}
    (folder / MANIFEST).write_text(json.dumps({"version": _VERSION, "files": files}, indent=2) + "\n", encoding="utf-8")


def write_listed_json(path: Path, value: object) -> None:
    """Write `value` to `path` in a saved checkpoint as JSON, and keep the manifest true to it.

    A file that was edited since it was saved, or was never listed, does not become one that a save wrote. While it is
    written the manifest lists its old and its new content: a process that is killed at any time leaves one of them.
    """
    files, text = read_manifest(path.parent), json.dumps(value, indent=2, allow_nan=False) + "\n"
    listed = None if files is None else files.get(path.name)
    now = _fingerprint(path) if path.is_file() else None
    if files is None or now is None or now not in (listed if isinstance(listed, list) else [listed]):
        write_text(path, text)
        return
    content = text.replace("\n", os.linesep).encode()
    new = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest = path.parent / MANIFEST
    write_json(manifest, {"version": _VERSION, "files": files | {path.name: [now, new]}})
    write_text(path, text)
    write_json(manifest, {"version": _VERSION, "files": files | {path.name: new}})


def read_manifest(folder: Path) -> dict[str, object] | None:
    """Return the files that the manifest in `folder` lists, with their fingerprints; None: there is no manifest.

    A file has a list of two where a process was killed in `write_listed_json`: of its old and its new content.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return None
    problem = "it is not a regular file"
    if path.is_file() and not path.is_symlink():
        try:
            content = read_json(path)
        except CheckpointError as error:
            content, problem = None, str(error.__cause__)
        else:
            problem = "it must hold an object with version 1 and files"
        if isinstance(content, dict) and content.get("version") == _VERSION and isinstance(content.get("files"), dict):
            files = content["files"]
            return files
    raise CheckpointError(
        f"{path} does not tell which files a save wrote: {problem}. Choose another folder, or move what you need out "
        "of this one and delete it."
    )


def unsaved_entries(folder: Path, files: Mapping[str, object]) -> dict[str, str]:
    """Return the entries of `folder` that are not as a save wrote them: name and why.

    Args:
        folder: of a checkpoint.
        files: that its manifest lists.
    """
    problems = {name: _problem(entry, files.get(name)) for name, entry in sorted(walk(folder)) if name != MANIFEST}
    return {name: problem for name, problem in problems.items() if problem is not None}


def _problem(entry: os.DirEntry[str], listed: object) -> str | None:
    problem = irregularity(entry)
    if problem is None and listed is None:
        problem = "not written by a save"
    if problem is not None:
        return problem
    try:
        size = entry.stat(follow_symlinks=False).st_size
        contents = listed if isinstance(listed, list) else [listed]  # of one that `write_listed_json` was writing
        sizes = [content.get("size") for content in contents if isinstance(content, dict)]
        is_equal = size in sizes and _fingerprint(Path(entry.path)) in contents
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


def _fingerprint(path: Path) -> dict[str, object]:
    with path.open("rb") as file:
        return {"size": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def unrecognised_entries(folder: Path) -> dict[str, str]:
    """Return the entries of `folder` that are not recognisably of a saved checkpoint: name and why."""
    entries = dict(sorted(walk(folder)))
    problems = {name: irregularity(entry) for name, entry in entries.items()}
    regular = [name for name, problem in problems.items() if problem is None]
    known = _recognised(folder, regular)
    for name in sorted(set(regular) - known):
        problems[name] = "not recognised as written by a save"
    return {name: problem for name, problem in problems.items() if problem is not None}


def _recognised(folder: Path, names: Iterable[str]) -> set[str]:
    """Return those of `names`, of regular files, that a save wrote."""
    named = object_or_empty(folder / "tokenizer_config.json").get("tokenizer_class")
    of_tokenizer = saved_names(named if isinstance(named, str) else None)
    known = {*of_tokenizer, *_shards(folder), *_bundled_code(folder), *_sentence_files(folder)}
    adapters = {os.path.dirname(name) for name in names if os.path.basename(name) == ADAPTER_CONFIG}
    known |= {
        os.path.join(adapter_folder, name)
        for adapter_folder in adapters
        if "/" not in adapter_folder
        for name in _ADAPTER
    }
    known |= {
        os.path.join(adapter_folder, CARD)
        for adapter_folder in adapters
        if _is_untouched_card(folder / adapter_folder / CARD)
    }
    known |= {CARD} if is_saved_readme(folder / CARD) else set()
    return {name for name in names if name in known or _TEMPLATE.fullmatch(name)}


def _shards(folder: Path) -> set[str]:
    """Return the files that the indices of the weights name, and these indices."""
    files = set()
    for index in WEIGHTS.values():
        shards = object_or_empty(folder / index).get("weight_map")
        if isinstance(shards, dict):
            files |= {index, *(name for name in shards.values() if isinstance(name, str) and _SHARD.fullmatch(name))}
    return files


def _bundled_code(folder: Path) -> set[str]:
    """Return the code that this package bundles with a plugin checkpoint, and what that of older versions imports."""
    text = _text(folder / _ENTRY)
    if not text.startswith('"""Loads this checkpoint where hf_posswap is not installed'):
        return set()
    return {_ENTRY, *(f"{module}.py" for module in _BUNDLE.findall(text))}


def _sentence_files(folder: Path) -> set[str]:
    """Return the files of sentence-transformers, if it wrote the list of its modules."""
    try:
        modules = read_json(folder / _SENTENCES[0])
    except CheckpointError:
        return set()
    rows = [module for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    if not rows or not all(str(row.get("type")).startswith("sentence_transformers.") for row in rows):
        return set()
    module_folders = [
        module_folder
        for row in rows
        if isinstance(module_folder := row.get("path"), str) and _MODULE.fullmatch(module_folder)
    ]
    return {*_SENTENCES, *(f"{module_folder}/{name}" for module_folder in module_folders for name in _MODULE_FILES)}


def _is_untouched_card(path: Path) -> bool:
    """Return whether the model card in `path` is the one that PEFT writes, with nothing added or filled in."""
    from huggingface_hub import ModelCard, ModelCardData

    text = _text(path)
    if not text:
        return False
    try:
        card, template = ModelCard(text), ModelCard.from_template(ModelCardData())
    except Exception:  # a damaged header may raise anything: then it counts as the user's
        return False
    body = _PEFT_VERSIONS.sub("", card.text.rstrip() + "\n")
    return set(card.data.to_dict()) <= _CARD_DATA and body.split() == template.text.split()


def _text(path: Path) -> str:
    try:
        return read_bounded(path)
    except (OSError, ValueError):
        return ""
