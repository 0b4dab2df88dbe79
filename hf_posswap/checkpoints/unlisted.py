"""Checkpoints without a manifest, of stock `save_pretrained` or an older version: which files a save wrote.

Files that are not recognised count as the user's. So do files that a user may write or edit: code, and model cards,
except a card that is word for word PEFT's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_posswap.checkpoints.adapters import ADAPTER_CONFIG
from hf_posswap.checkpoints.card import is_saved_readme
from hf_posswap.checkpoints.manifest import irregularity, walk
from hf_posswap.compat.transformers_saved import WEIGHTS, saved_names
from hf_posswap.errors import CheckpointError
from hf_posswap.patching.record.adapter_marks import SIDECAR
from hf_posswap.utils.atomic_io import read_json
from hf_posswap.utils.untrusted import read_bounded

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
_VERSIONS = re.compile(r"\n### Framework versions\s+(- PEFT \S+\s*)+$")


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
    known = {*saved_names(_tokenizer_class(folder)), *_shards(folder), *_bundled_code(folder), *_sentence_files(folder)}
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


def _tokenizer_class(folder: Path) -> str | None:
    named = _object(folder / "tokenizer_config.json").get("tokenizer_class")
    return named if isinstance(named, str) else None


def _shards(folder: Path) -> set[str]:
    """Return the files that the indices of the weights name, and these indices."""
    files = set()
    for index in WEIGHTS.values():
        shards = _object(folder / index).get("weight_map")
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
    body = _VERSIONS.sub("", card.text.rstrip() + "\n")
    return set(card.data.to_dict()) <= _CARD_DATA and body.split() == template.text.split()


def _object(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except CheckpointError:
        return {}
    return content if isinstance(content, dict) else {}


def _text(path: Path) -> str:
    try:
        return read_bounded(path)
    except (OSError, ValueError):
        return ""
