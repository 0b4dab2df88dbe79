"""Saving a model and its tokenizer, whole or not at all."""

from __future__ import annotations

import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.checkpoints.adapters import ADAPTER_CONFIG, save_with_swap
from hf_posswap.compat.accelerate_hooks import offloading_hooks
from hf_posswap.errors import CheckpointError
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.utils.atomic_io import read_json, replacing, settle, shown

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FILES = (
    "*.json", "*.safetensors", "*.bin", "*.py", "*.jinja", "*.model", "*.spm", "*.tiktoken", "vocab.*", "merges.txt",
    "dict.txt", "bpe.codes", "README.md", "LICENSE*",
)  # fmt: skip
"""What `save_pretrained` of models, tokenizers and processors writes, now or formerly."""
_MODULE = re.compile(r"\d+_\w+|additional_chat_templates")
"""Folders in a checkpoint: modules of sentence-transformers, templates of a tokenizer."""


def save(model: PreTrainedModel, folder: str | Path, *, tokenizer: Any = None, overwrite: bool = False) -> Path:
    """Write `model`, swapped or not, and its tokenizer to `folder`, and return the folder.

    Everything is written beside it first, then takes its place: a save that is interrupted, even killed, leaves what
    was there or what was to come, never a mix.

    Args:
        model: a transformers model, or a PEFT model: then the adapter, with the swap of its base.
        folder: where to; its parents are made.
        tokenizer: saved beside the model; where it cuts texts at the length that the model had before its swap, the
            saved one cuts them at the swap's.
        overwrite: replace a folder that holds a checkpoint, and nothing else.

    Raises:
        CheckpointError: the folder holds something (with `overwrite`: something that is no part of a checkpoint), or
            cannot be written; or weights are offloaded, and no device map says where.

    Example:
        >>> import tempfile
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import load, patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = save(patch_model(model, "alibi"), Path(folder) / "model")
        ...     load(saved).config.posswap["scheme"]["name"]
        'alibi'
    """
    path = Path(folder)
    settle(path)
    refuse_to_replace(path, overwrite)
    _refuse_offloaded(model)
    with replacing(path) as temporary:
        save_with_swap(model, temporary)
        if tokenizer is not None:
            with _reading_as_far(tokenizer, model):
                tokenizer.save_pretrained(temporary)
        _as_umask_says(temporary)
    return path


@contextmanager
def _reading_as_far(tokenizer: Any, model: Any) -> Iterator[None]:
    """Have `tokenizer`, or that of a processor, cut texts where the swapped `model` ends, in the block."""
    words, patch = getattr(tokenizer, "tokenizer", tokenizer), getattr(unwrap(model), "_posswap", None)
    before = getattr(words, "model_max_length", None)
    if patch is None or patch.plan.max_length is None or before != patch.plan.sites.geometry.original_length:
        yield
        return
    words.model_max_length = patch.plan.max_length
    try:
        yield
    finally:
        words.model_max_length = before


def refuse_to_replace(folder: Path, overwrite: bool) -> None:
    """Refuse a folder to save to that holds what a save would delete.

    Args:
        folder: which may be missing or empty.
        overwrite: whether a checkpoint in it may go.

    Raises:
        CheckpointError: it is a file, or holds something; with `overwrite`: something that no `save_pretrained` wrote.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(f"{folder} is a file; give a folder to save to.")
        names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"cannot write {shown(folder)}: {error.strerror}. Choose another folder.") from error
    if names and not overwrite:
        raise CheckpointError(f"{folder} is not empty; choose another folder, or pass overwrite=True to replace it.")
    if names and not _holds_config(folder):
        raise CheckpointError(
            f"{folder} holds no config.json of a model and no {ADAPTER_CONFIG}, but {_listed(names)}: overwriting "
            "replaces nothing but checkpoints. Choose another folder, or empty this one by hand."
        )
    foreign = [name for name in names if not _belongs(folder / name)]
    if foreign:
        raise CheckpointError(
            f"{folder} holds more than a checkpoint: {_listed(foreign)} would be deleted. Move that elsewhere, or "
            "choose another folder."
        )


def _holds_config(folder: Path) -> bool:
    if (folder / ADAPTER_CONFIG).is_file():
        return True
    try:
        config = read_json(folder / "config.json")
    except CheckpointError:
        return False
    return isinstance(config, dict) and not {"model_type", "architectures"}.isdisjoint(config)


def _belongs(path: Path) -> bool:
    """Return whether `path`, in the folder of a checkpoint, is part of it."""
    if path.is_dir():
        return bool(_MODULE.fullmatch(path.name)) or (path / ADAPTER_CONFIG).is_file()
    return any(fnmatch(path.name, pattern) for pattern in _FILES)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _refuse_offloaded(model: Any) -> None:
    """Refuse a model whose weights transformers could not find: it looks for them where a device map says."""
    if getattr(model, "hf_device_map", None) is None and any(
        any(offloading_hooks(module)) for module in model.modules()
    ):
        raise CheckpointError(
            f"weights of {type(model).__name__} are offloaded by accelerate's hooks, and it has no device map by which "
            "transformers finds them. Call accelerate.hooks.remove_hook_from_submodules(model) before saving."
        )


def _as_umask_says(folder: Path) -> None:
    """Give every file the mode of an ordinary new file: safetensors writes its own for the owner alone."""
    probe = folder / f".mode-{uuid.uuid4().hex}"  # to ask for the mask is to change it, for all threads
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(mode)
