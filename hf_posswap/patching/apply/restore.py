"""Run-time services for the classes of swapped models: restoring a recorded swap, and initializing its modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_posswap.compat.peft_wrappers import original_of
from hf_posswap.compat.torch_fake import without_fake_mode
from hf_posswap.compat.transformers_models import fill_weights, is_initialised, mark_initialised
from hf_posswap.errors import RecordError
from hf_posswap.patching.apply.patch_model import apply_plan
from hf_posswap.patching.edits.removed_table import NoPositions
from hf_posswap.patching.plan.adaptation import as_trained
from hf_posswap.patching.plan.plan_swap import plan_swap
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.model_class import Runtime, native_class, run_by
from hf_posswap.patching.record.record import SwapRecord
from hf_posswap.patching.sites.attention.edits import AddMechanism
from hf_posswap.patching.sites.embedding.table_edits import BlendedTable, BlendTable
from hf_posswap.schemes.blend import Blend


def restore_swap(model: Any, record: SwapRecord) -> None:
    """Apply the swap of `record` to a freshly built native `model`; its weights are loaded afterwards.

    Raises:
        RecordError: this version of the package would apply a different swap than the recorded one.
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
    """Initialize `module` of a swapped `model`, except for tensors loaded from a checkpoint.

    Returns whether a swap added the module; False if `model` is a submodel without the swap's state.
    """
    patch = getattr(model, "_posswap", None)
    if patch is None:
        return False
    if isinstance(module, NoPositions):
        _begin(module, "weight", torch.zeros_like(module.weight))
    elif isinstance(module, BlendedTable):
        _begin_blended(model, module, patch.plan)
    elif (fresh := _fresh_mechanism(model, module, patch.plan)) is not None:
        for path, submodule in fresh.named_modules():
            for name, start in submodule.named_parameters(recurse=False):
                _begin(module.get_submodule(path), name, start)
    else:
        return False
    for submodule in module.modules():
        mark_initialised(submodule)
    return True


def freeze(model: Any) -> None:
    """Freeze the weights that the swap of the loaded `model` freezes."""
    for edit in model._posswap.plan.edits:
        edit.freeze(model)


def _fresh_mechanism(model: Any, module: nn.Module, plan: SwapPlan) -> nn.Module | None:
    """Return a new mechanism like `module` if it is one of the plan's; else None."""
    for edit in plan.edits:
        if isinstance(edit, AddMechanism):
            carried: Any = model.get_submodule(edit.path)
            if module is original_of(carried):  # PEFT wraps fully trained modules
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
    tensor: Tensor = getattr(module, name)
    if not is_initialised(tensor) and not tensor.is_meta:
        tensor.copy_(start)
        mark_initialised(tensor)  # stock modules fill tensors of their children


run_by(Runtime(restore_swap, initialise, freeze))
