"""Saving a model and its tokenizer, whole or not at all."""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from hf_posswap.checkpoints.adapters import ADAPTER_CONFIG, save_with_swap
from hf_posswap.checkpoints.card import saved_readme
from hf_posswap.checkpoints.manifest import (
    CARD,
    State,
    read_manifest,
    state_of,
    unrecognised_entries,
    unsaved_entries,
    write_manifest,
)
from hf_posswap.compat.accelerate_state import offloading_hooks
from hf_posswap.compat.peft_wrappers import copy_for, trained_copies_of
from hf_posswap.compat.transformers_loading import unpack_4_bit_weights
from hf_posswap.errors import CheckpointError, OptionError
from hf_posswap.patching.edits.settings import EditConfig
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.utils.atomic_io import object_or_empty, replacing, settle, shown, sweep
from hf_posswap.utils.format import brief
from hf_posswap.utils.printable import brief_repr
from hf_posswap.utils.sentence_models import inner_model, is_sentence_model

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TRIES = 100  # another writer may replace the folder while it is read


def save(model: PreTrainedModel, folder: str | Path, *, tokenizer: Any = None, overwrite: bool = False) -> Path:
    """Write `model`, swapped or not, and its tokenizer to `folder`, and return the folder.

    Everything is written to a temporary folder next to it, which then replaces it: a save that is interrupted, even
    killed, leaves the old or the new checkpoint, never a mix.

    Args:
        model: a transformers model; or a PEFT model: then the adapter, with the swap of its base; or a
            SentenceTransformer: then all its modules and its tokenizer, for `SentenceTransformer(folder)` after
            `import hf_posswap`, which opens an adapter only if its base was saved with the swap.
        folder: where to; its parents are made.
        tokenizer: saved with the model; where it truncates texts at the model's length before the swap, the saved
            one truncates at the swap's length. The same holds for `max_length` of the model's generation_config.
        overwrite: replace a folder in which everything is as a save wrote it. Files that were added or edited are never
            deleted: they are named, and nothing changes.

    Raises:
        CheckpointError: the folder holds something (with `overwrite`: something that no save wrote, or that was changed
            since), or cannot be written; or weights are offloaded, and no device map says where, or are quantized in a
            form that no checkpoint holds; or the config was changed since the swap, where the swap set it.
        OptionError: another tokenizer than its own was given with a SentenceTransformer; or `folder` is not a path.
        UnsupportedSwapError: `model` is none of these; a SentenceTransformer has no transformers model in it, or
            several; or an adapter in it has a base that was swapped in memory.

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
    if not isinstance(folder, str | os.PathLike):
        raise OptionError(f"a model is saved to a folder: give its path, got {brief_repr(folder)}.")
    path = Path(folder)
    unwrap(model)  # raises where it is none
    _refuse_offloaded(model)
    if is_sentence_model(model):
        inner_model(model)  # raises where there is none
        if tokenizer is not None and tokenizer is not model.tokenizer:
            raise OptionError("a SentenceTransformer is saved with its own tokenizer: leave tokenizer out.")
        tokenizer = None
    with replacing_checkpoint(path, overwrite) as temporary:
        write_files(model, temporary, tokenizer)
    return path


@contextmanager
def replacing_checkpoint(path: Path, overwrite: bool) -> Iterator[Path]:
    """Give a folder to write a checkpoint to; at the end it takes the place of `path`, with a manifest of its files.

    Args:
        path: to save to.
        overwrite: whether a checkpoint that is there may go.

    Raises:
        CheckpointError: as `save`; or something was put into the folder meanwhile.
    """
    settle(path)
    state = refuse_to_replace(path, overwrite)
    with replacing(path) as temporary:
        yield temporary
        write_manifest(temporary)
        _as_umask_says(temporary)
        if state_of(path) != state:
            refuse_to_replace(path, overwrite)


def write_files(model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the files of `model`, and of `tokenizer` unless it is None, to `folder`."""
    _refuse_changed_config(unwrap(model))
    _refuse_quantized(model)
    unpack_4_bit_weights(model)
    target = unwrap(model)
    if getattr(target, "peft_config", None) is None:  # some merges of PEFT leave what was trained in full wrapped
        for path in [path for path, module in target.named_modules() if trained_copies_of(module)]:
            target.set_submodule(path, cast("nn.Module", copy_for(target.get_submodule(path), None)))
    with _of_new_length(getattr(unwrap(model), "generation_config", None), "max_length", model):
        save_with_swap(model, folder)
    patch, readme = getattr(unwrap(model), "_posswap", None), folder / CARD
    if patch is not None and not readme.exists():  # that of an adapter is PEFT's
        inner = unwrap(model)
        readme.write_text(saved_readme(folder, patch.plan, type(inner).__name__, inner.name_or_path), encoding="utf-8")
    if tokenizer is not None:
        with _of_new_length(getattr(tokenizer, "tokenizer", tokenizer), "model_max_length", model):
            tokenizer.save_pretrained(folder)


def _refuse_changed_config(model: PreTrainedModel) -> None:
    """Refuse a swapped model whose config was changed since, where the swap set it: `load` would refuse the files."""
    patch = getattr(model, "_posswap", None)
    if patch is None:
        return
    for edit in patch.plan.edits:
        if isinstance(edit, EditConfig) and (problem := edit.check(model)):
            raise CheckpointError(
                f"config.{edit.path} was changed after the swap to {patch.plan.named}: {problem}, and load would "
                f"refuse what is saved. Set model.config.{edit.path} back to {brief(edit.value)}; for another value "
                "call unpatch_model(model), then patch_model."
            )


def _refuse_quantized(model: PreTrainedModel) -> None:
    """Refuse quantized weights that no file holds, or that nothing loads from one: transformers has to know of them."""
    quantizer = getattr(unwrap(model), "hf_quantizer", None)
    if getattr(model, "peft_config", None) is not None or (quantizer is not None and quantizer.is_serializable()):
        return
    weights: dict[str, object] = {
        name: weight
        for name, weight in model.named_parameters()
        if weight.dtype in (torch.int8, torch.uint8) or hasattr(weight, "__tensor_flatten__")
    }
    for name, value in model.state_dict().items():  # torch.ao packs weights into what is no tensor
        if not isinstance(value, torch.Tensor) and not name.endswith("extra_state"):
            weights[name] = value
    if weights:
        name, weight = next(iter(weights.items()))
        raise CheckpointError(
            f"a checkpoint cannot hold {len(weights)} quantized weights of {type(model).__name__}, such as {name}, of "
            f"class {type(weight).__name__}: nothing would load them. Save the swapped model before it is quantized, "
            "and quantize it when you load it: hf_posswap.load(folder, quantization_config=...). What transformers "
            "quantizes so with torchao or bitsandbytes can be saved."
        )


@contextmanager
def _of_new_length(holder: object, name: str, model: PreTrainedModel) -> Iterator[None]:
    """Inside the block, make the length `name` of `holder` that of the swapped `model`, where it was its old one."""
    patch, before = getattr(unwrap(model), "_posswap", None), getattr(holder, name, None)
    if patch is None or patch.plan.max_length is None or before != patch.plan.sites.geometry.original_length:
        yield
        return
    setattr(holder, name, patch.plan.max_length)
    try:
        yield
    finally:
        setattr(holder, name, before)


def refuse_to_replace(folder: Path, overwrite: bool) -> State:
    """Refuse a folder to save to that holds what a save would delete; return its state, by which changes are seen.

    Args:
        folder: which may be missing or empty.
        overwrite: whether a checkpoint in it may go, if everything in it is as a save wrote it.

    Raises:
        CheckpointError: it is a file or a mount point, or holds something; with `overwrite`: something that no save
            wrote, or that was changed since.
    """
    for _ in range(_TRIES):
        identity = _identity(folder)
        state: State = {}
        try:
            if overwrite:
                sweep(folder, own=True)  # what a process left that was killed while it wrote one of the files
            state = state_of(folder)
            refusal = _refusal(folder, overwrite)
        except CheckpointError as error:
            refusal = str(error)
        except OSError as error:
            refusal = f"cannot write {shown(folder)}: {error.strerror}. Choose another folder."
        if _identity(folder) == identity:
            break
    if refusal is not None:
        raise CheckpointError(refusal)
    return state


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return what tells `folder` from another one that has taken its place; None: there is none."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _refusal(folder: Path, overwrite: bool) -> str | None:
    """Return why `folder` cannot be saved to; None: nothing would be lost."""
    if folder.is_symlink() and not folder.exists():
        return f"{shown(folder)} is a symbolic link to {os.readlink(folder)}, which does not exist; give a folder."
    if folder.exists() and not folder.is_dir():
        return f"{folder} is a file; give a folder to save to."
    if os.path.ismount(folder):
        return (
            f"{shown(folder)} is a mount point, which a save cannot replace as a whole; give a folder in it, such as "
            f"{shown(folder / 'model')}."
        )
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    if not names:
        return None
    if not overwrite:
        return (
            f"{folder} is not empty; choose another folder, or replace it: with overwrite=True, --overwrite on the "
            "command line."
        )
    files = read_manifest(folder)
    names_model = not {"model_type", "architectures"}.isdisjoint(object_or_empty(folder / "config.json"))
    if files is None and not (folder / ADAPTER_CONFIG).is_file() and not names_model:
        return (
            f"{folder} holds no config.json of a model and no {ADAPTER_CONFIG}, but {_listed(names)}: overwriting "
            "replaces nothing but checkpoints. Choose another folder, or empty this one yourself."
        )
    foreign = unrecognised_entries(folder) if files is None else unsaved_entries(folder, files)
    if not foreign:
        return None
    named = _listed([f"{name} ({problem})" for name, problem in foreign.items()])
    return (
        f"{folder} holds more than a saved checkpoint, and overwriting would delete it: {named}. Nothing was changed: "
        "move that elsewhere, or choose another folder."
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _refuse_offloaded(model: PreTrainedModel) -> None:
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
