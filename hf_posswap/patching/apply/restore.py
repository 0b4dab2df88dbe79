"""What the classes of swapped models need at run time: putting a recorded swap back, and what it begins with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_posswap.compat.peft_wrappers import original_of
from hf_posswap.compat.torch_fake import without_fake_mode
from hf_posswap.compat.transformers_models import fill_weights, is_initialised, mark_initialised
from hf_posswap.errors import RecordError
from hf_posswap.patching.apply.patch_model import apply_plan
from hf_posswap.patching.edits.placeholder import NoPositions
from hf_posswap.patching.plan.adaptation import as_trained
from hf_posswap.patching.plan.plan_swap import plan_swap
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.model_class import Runtime, native_class, run_by
from hf_posswap.patching.record.record import SwapRecord
from hf_posswap.patching.sites.attention.edits import AddMechanism
from hf_posswap.patching.sites.embedding.blended_table import BlendedTable
from hf_posswap.patching.sites.embedding.table_edits import BlendTable
from hf_posswap.schemes.blend import Blend


def restore_swap(model: Any, record: SwapRecord) -> None:
    """Put the swap of `record` into a freshly built native `model`; its weights come afterwards.

    Raises:
        RecordError: this version of the package would carry out another swap than the one recorded.
    """
    with without_fake_mode():
        _restore(model, record)


def _restore(model: Any, record: SwapRecord) -> None:
    plan = plan_swap(model, record.choice(), **record.arguments)
    if plan.route != record.route:
        raise RecordError(
            f"config.posswap records a {record.route} swap to {plan.named}, but here it would be {plan.route}: "
            f"use the version of transformers that the checkpoint was made with."
        )
    apply_plan(model, as_trained(plan, record, model.config))
    if not all(isinstance(scheme, Blend) for scheme in plan.schemes.values()):  # a blend holds the old mechanism too
        model._posswap.saved = None


@torch.no_grad()
def initialise(model: Any, module: nn.Module) -> bool:
    """Give `module` of a swapped `model` what it begins with, but for what a checkpoint gave it.

    Returns whether a swap brought the module; `model` may be a part that does not know.
    """
    patch = getattr(model, "_posswap", None)
    if patch is None:
        return False
    if isinstance(module, NoPositions):
        _begin(module, "weight", torch.zeros_like(module.weight))
    elif isinstance(module, BlendedTable):
        _begin_blended(model, module, patch.plan)
    elif (fresh := _fresh_mechanism(model, module, patch.plan)) is not None:
        for path, part in fresh.named_modules():
            for name, start in part.named_parameters(recurse=False):
                _begin(module.get_submodule(path), name, start)
    else:
        return False
    for part in module.modules():
        mark_initialised(part)
    return True


def freeze(model: Any) -> None:
    """Freeze again what the swap of `model`, which was loaded, freezes."""
    for edit in model._posswap.plan.edits:
        edit.freeze(model)


def _fresh_mechanism(model: Any, module: nn.Module, plan: SwapPlan) -> nn.Module | None:
    """Return a new mechanism like `module`, where that is one of the plan's."""
    for edit in plan.edits:
        if isinstance(edit, AddMechanism):
            carried: Any = model.get_submodule(edit.path)
            if module is original_of(carried):  # PEFT wraps what it trains in full
                with torch.device("cpu"):
                    return edit.scheme.mechanism(edit.geometry)
    return None


def _begin_blended(model: Any, module: BlendedTable, plan: SwapPlan) -> None:
    module.native.weight = module.old
    fill_weights(native_class(type(model)), model, module.native)
    _begin(module, "weight", torch.zeros_like(module.weight))
    for edit in plan.edits:
        if module.new is not None and isinstance(edit, BlendTable):
            if model.get_submodule(edit.path) is module:
                new = edit.new_rows(module.old)
                assert new is not None
                _begin(module, "new", new)


def _begin(module: nn.Module, name: str, start: Tensor) -> None:
    """Write `start` into a parameter or buffer of `module`, unless a checkpoint has filled it."""
    held: Tensor = getattr(module, name)
    if not is_initialised(held) and not held.is_meta:
        held.copy_(start)
        mark_initialised(held)  # stock modules fill tensors of their children


run_by(Runtime(restore_swap, initialise, freeze))
