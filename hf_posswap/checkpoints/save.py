"""Saving a model and its tokenizer, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.checkpoints.adapters import save_with_swap
from hf_posswap.errors import CheckpointError
from hf_posswap.files import replacing, settle
from hf_posswap.patching.offloaded import hooks_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def save(model: PreTrainedModel, folder: str | Path, *, tokenizer: Any = None, overwrite: bool = False) -> Path:
    """Write `model`, swapped or not, and its tokenizer to `folder`, and return the folder.

    Everything is written beside it first, then takes its place: a save that is interrupted, even killed, leaves what
    was there or what was to come, never a mix.

    Args:
        model: a transformers model, or a PEFT model: then the adapter, with the swap of its base.
        folder: where to; its parents are made.
        tokenizer: saved beside the model.
        overwrite: replace a folder that holds something.

    Raises:
        CheckpointError: the folder holds something, or cannot be written; or weights are offloaded, and no device map
            says where.
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file; give a folder to save to.")
    settle(path)
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise CheckpointError(f"{path} is not empty; choose another folder, or pass overwrite=True to replace it.")
    _refuse_offloaded(model)
    with replacing(path) as temporary:
        save_with_swap(model, temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        _as_umask_says(temporary)
    return path


def _refuse_offloaded(model: Any) -> None:
    """Refuse a model whose weights transformers could not find: it looks for them where a device map says."""
    if getattr(model, "hf_device_map", None) is None and any(any(hooks_of(module)) for module in model.modules()):
        raise CheckpointError(
            f"weights of {type(model).__name__} are offloaded by accelerate's hooks, and it has no device map by which "
            "transformers finds them. Call accelerate.hooks.remove_hook_from_submodules(model) before saving."
        )


def _as_umask_says(folder: Path) -> None:
    """Give every file the mode of an ordinary new file: safetensors writes its own for the owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o666 & ~mask)
