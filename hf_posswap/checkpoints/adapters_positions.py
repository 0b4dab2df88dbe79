"""The positions of an adapter's base: whether it is swapped, what its scheme learns, what saving would lose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_posswap.compat.peft_wrappers import is_saved_with_adapter
from hf_posswap.errors import CheckpointError, NotPatchedError, UnsupportedSwapError
from hf_posswap.patching.record.adapter_marks import base_of
from hf_posswap.patching.sites.attention.edits import AddMechanism
from hf_posswap.patching.sites.embedding.table_edits import ReplaceTable
from hf_posswap.patching.tools.centring import CENTRED
from hf_posswap.utils.atomic_io import shown
from hf_posswap.utils.untrusted import read_bounded_json


def is_swapped(model: Any) -> bool:
    """Return whether `model`, or the base inside a PEFT model, carries a swap."""
    return getattr(base_of(model), "_posswap", None) is not None


def swapped_base(model: Any) -> Any:
    """Return the swapped transformers model: `model`, or the base inside a PEFT model.

    Raises:
        NotPatchedError: it carries no swap.
    """
    base = base_of(model)
    if getattr(base, "_posswap", None) is None:
        raise NotPatchedError(f"{type(base).__name__} carries no swap: there are no positions to train or to record.")
    return base


def lies_on_disk(base: Any) -> bool:
    """Return whether the checkpoint that a swapped model was loaded from carries the swap itself.

    Raises:
        CheckpointError: its config.json cannot be read any more.
    """
    if not base._posswap.can_undo:
        return True
    path = Path(base.name_or_path or "/nowhere") / "config.json"  # a blend keeps its undo when it is loaded
    try:
        return path.is_file() and "posswap" in read_bounded_json(path)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"cannot read {shown(path)}, from whose folder the base of this adapter was loaded: {error}. Whether that "
            "checkpoint carries the swap is not known: restore the file, and save again."
        ) from error


def position_modules(model: Any) -> list[str]:
    """Return the names for PEFT's `modules_to_save` of the position modules that training changes; [] where none does.

    PEFT freezes the base, and what a scheme learns with it (the numbers of FIRE, Kerple or T5's bias, the rows of a
    learned table). Named in `modules_to_save` they are trained in full and saved with the adapter.

    Args:
        model: a swapped model.

    Raises:
        NotPatchedError: it carries no swap.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> model = patch_model(model, "kerple")
        >>> position_modules(model)
        ['posswap']
    """
    return sorted({path.rpartition(".")[2] for path, _ in _learned(swapped_base(model))})


def refuse_lost_positions(model: Any) -> None:
    """Refuse to save an adapter without the position parameters that were, or are being, trained.

    Raises:
        CheckpointError: names them, and what to do.
    """
    if getattr(model, "peft_config", None) is None or not is_swapped(model):
        return
    base = swapped_base(model)
    unsaved = [(path, module) for path, module in _learned(base) if not is_saved_with_adapter(module)]
    lost = [path for path, module in unsaved if _is_trained(base, path, module)]
    if lost:
        raise CheckpointError(
            f"{', '.join(lost)}: trained position parameters that are not part of the adapter would be lost. Wrap the "
            f"model with modules_to_save={position_modules(base)} (hf_posswap.add_adapter does), or save the swapped "
            "base first, and put the adapter on what hf_posswap.load returns."
        )


def refuse_changed_base(model: Any) -> None:
    """Refuse to save an adapter whose base has, in memory, other weights than the checkpoint that it would be put on.

    Args:
        model: a PEFT model, or the base inside it.

    Raises:
        UnsupportedSwapError: names the function of this package that changed them, and what to do.
    """
    if not is_swapped(model):
        return
    base = swapped_base(model)
    changed = {
        "fit_rotation has changed queries and keys": base._posswap.fitted,
        "centre_table has changed the token embeddings": getattr(base, CENTRED, False),
    }
    for change in (change for change, was in changed.items() if was):
        raise UnsupportedSwapError(
            f"{change} of {type(base).__name__}, which an adapter does not hold: save the model with hf_posswap.save "
            "before an adapter is put on it, load it again, and train adapters on that."
        )


def _learned(base: Any) -> list[tuple[str, nn.Module]]:
    """Return the modules of a swapped model with parameters of its scheme: path and module."""
    learned = []
    for edit in base._posswap.plan.edits:
        learns = isinstance(edit, AddMechanism) or (isinstance(edit, ReplaceTable) and edit.scheme.trainable)
        if learns:
            module = base.get_submodule(edit.path)
            learned += [(edit.path, module)] if any(True for _ in module.parameters()) else []
    return learned


def _is_trained(base: Any, path: str, module: nn.Module) -> bool:
    """Return whether `module` has, or may get, other values than the swap alone put there."""
    if any(parameter.requires_grad for parameter in module.parameters()):
        return True
    if lies_on_disk(base):  # as it was loaded
        return False
    learned_edits, swap = (AddMechanism, ReplaceTable), base._posswap
    edit, saved = next(
        (edit, saved) for edit, saved in swap.done() if isinstance(edit, learned_edits) and edit.path == path
    )
    if isinstance(edit, AddMechanism):
        fresh = dict(edit.scheme.mechanism(edit.geometry).named_parameters())
        return any(
            not torch.equal(p.detach().cpu(), fresh[n].detach().to(p.dtype)) for n, p in module.named_parameters()
        )
    weight: Any = module.weight
    expected = edit.scheme.table(saved["weight"].detach()[edit.offset :], edit.rows, edit.geometry)
    return not torch.equal(weight.detach()[edit.offset :].cpu(), expected.to(weight.dtype))
