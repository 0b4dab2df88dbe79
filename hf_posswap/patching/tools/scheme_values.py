"""Changing a number of a swap in force: the weight of a blend, until it ends, or the logit scale without positions."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from hf_posswap.compat.peft_wrappers import copy_for, is_adapted, original_of, trained_copies_of
from hf_posswap.errors import NotPatchedError, SchemeError, UnsupportedSwapError
from hf_posswap.patching.apply.applied import applied_swap
from hf_posswap.patching.apply.guard import alone
from hf_posswap.patching.apply.patch_model import patch_model, swap_plan, unpatch_model
from hf_posswap.patching.edits.edit import Edit
from hf_posswap.patching.edits.restore import stored
from hf_posswap.patching.plan.adaptation import as_trained
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.training import NAME as TRAINING
from hf_posswap.patching.record.training import swap_digest, training_of
from hf_posswap.patching.sites.attention.edits import AddMechanism
from hf_posswap.patching.sites.embedding.table_edits import BlendTable, ReplaceTable, rows_name
from hf_posswap.schemes.base import Scheme
from hf_posswap.schemes.blend import Blend
from hf_posswap.schemes.layered import RNoPE
from hf_posswap.schemes.nope import NoPE, NoPEMechanism

if TYPE_CHECKING:
    from transformers import PreTrainedModel

M = TypeVar("M", bound=nn.Module)


@alone(parameters=False)
def set_blend(model: nn.Module, weight: float) -> None:
    """Set the weight of the new mechanism in a model patched with `blend`, and update the record in its config.

    Args:
        model: a model patched with `blend`, in one of its stacks or in both (or a PEFT model around one).
        weight: w, in [0, 1]: at 0 the model is exactly the old one, at 1 the new one, up to rounding.

    Raises:
        NotPatchedError: the model carries no blend.
        SchemeError: weight is not a number in [0, 1].
        ModelInUseError: a forward of the model is running, or another thread changes it.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import Blend, Rope, patch_model, swap_plan
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> model = patch_model(model, Blend(new=Rope()))
        >>> for step in range(4):
        ...     set_blend(model, (step + 1) / 4)  # and train a little
        >>> swap_plan(finish_blend(model, max_length=64)).scheme.name
        'rope'
    """
    target = unwrap(model)
    plan, blends = _blend_plan(target)
    moved = {name: dataclasses.replace(blend, weight=weight) for name, blend in blends.items()}  # which checks it
    checked = [blend.weight for blend in moved.values()][-1]
    for edit in plan.edits:
        if edit.stack in moved:
            _move(target, edit, checked)
    _set_schemes(target, plan.schemes | moved)


@alone()  # for the whole function: between its two swaps there is no mechanism
def finish_blend(model: M, *, max_length: int | None = None) -> M:
    """Keep only the new mechanism, with its trained parameters, frozen ones frozen, and return the model.

    An optimizer continues to train the parameters of the new mechanism, which stay the same objects. A learned table is
    a new parameter if its number of rows changes (another `max_length`, or rows before position 0): make the optimizer
    anew.

    Args:
        model: a model whose blend has weight 1, in each stack that has one.
        max_length: positions it is meant for afterwards, in tokens; None: as in `patch_model`.

    Raises:
        NotPatchedError: the model carries no blend.
        SchemeError: the weight is not 1 yet.
        UnsupportedSwapError, ModelInUseError: inference mode is on, or the model is in use, as `patch_model`; or PEFT
            trains a copy of the table.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import Blend, Rope, patch_model, swap_plan
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> model = patch_model(model, Blend(new=Rope()))
        >>> set_blend(model, 1.0)
        >>> swap_plan(finish_blend(model, max_length=64)).max_length
        64
    """
    target = unwrap(model)
    plan, blends = _blend_plan(target)
    scheme = list(blends.values())[-1]  # of the main stack, if it has one
    least = min(blend.weight for blend in blends.values())
    if least != 1.0:
        raise SchemeError(
            f"the blend is at weight {least:g}: ending it now would change the outputs abruptly; "
            "call set_blend(model, 1.0) first."
        )
    tables = [edit.path for edit in plan.edits if isinstance(edit, BlendTable | ReplaceTable)]
    adapted = [path for path in tables if is_adapted(target.get_submodule(path))]
    if adapted:
        raise UnsupportedSwapError(
            f"PEFT trains a copy of {adapted[0]!r} in full, and the end of a blend writes new rows into that table. "
            "What works: model = model.merge_and_unload(), and finish_blend(model) then."
        )
    learned = {
        key: tensor
        if tensor is stored(*holder)
        else stored(*holder).detach().clone().requires_grad_(tensor.requires_grad)
        for key, holder in _new_tensors(target, plan).items()
        for tensor in [getattr(*holder)]  # itself, as an optimizer may hold it, unless it is offloaded
    }
    training = training_of(target.config)
    unpatch_model(model)
    try:
        planned_length = plan.max_length if scheme.old == "rotary" else None
        length = planned_length if max_length is None else max_length
        ended = {name: blend.new for name, blend in blends.items()}
        new = dataclasses.replace(plan, schemes=plan.schemes | ended).choice
        patch_model(model, new, **plan.record.arguments | {"max_length": length})
    except BaseException:
        patch_model(model, plan.choice, **plan.record.arguments)
        _fill(_new_tensors(target, swap_plan(target)), learned)
        raise
    if learned:
        _fill(_new_tensors(target, swap_plan(target)), learned)
    ended_plan = swap_plan(target)
    if training is not None and training.is_of(plan.record) and ended_plan.max_length == plan.max_length:
        # the same weights, without the blend
        ended_training = dataclasses.replace(training, swap=swap_digest(ended_plan.record))
        setattr(target.config, TRAINING, ended_training.to_dict())
        applied_swap(target).plan = as_trained(ended_plan, ended_plan.record, target.config)
    return model


def _set_schemes(target: PreTrainedModel, schemes: dict[str, Scheme]) -> None:
    """Let the plan and the record of a swapped model say `schemes`, by stack: the same types with other values."""
    applied_swap(target).plan = applied_swap(target).plan.with_schemes(schemes)
    target.config.posswap = applied_swap(target).plan.record.to_dict()


def _blend_plan(target: object) -> tuple[SwapPlan, dict[str, Blend]]:
    patch = getattr(target, "_posswap", None)
    schemes: dict[str, Scheme] = {} if patch is None else patch.plan.schemes
    blends = {name: scheme for name, scheme in schemes.items() if isinstance(scheme, Blend)}
    if patch is None or not blends:
        carried = "no swap" if patch is None else patch.plan.named
        raise NotPatchedError(f"{type(target).__name__} carries {carried}: patch_model(model, Blend(...)) first.")
    return patch.plan, blends


def _move(model: Any, edit: Edit, weight: float) -> None:
    """Set the weight in the module that `edit` added for the blend."""
    if isinstance(edit, AddMechanism):
        carried = model.get_submodule(edit.path)
        for mechanism in {carried, original_of(carried), *trained_copies_of(carried)}:
            mechanism.weight = weight
    elif isinstance(edit, BlendTable):
        table = model.get_submodule(edit.path)
        for blended in (original_of(table), *trained_copies_of(table)):
            blended.share = weight


def _new_tensors(model: Any, plan: SwapPlan) -> dict[str, tuple[nn.Module, str]]:
    """Return where the trained tensors of the new mechanism are, rows of a table and parameters: module and name."""
    tensors: dict[str, tuple[nn.Module, str]] = {}
    for edit in plan.edits:
        if not isinstance(edit, AddMechanism | BlendTable | ReplaceTable):
            continue
        module = model.get_submodule(edit.path)
        if isinstance(edit, AddMechanism):
            active: Any = copy_for(module, None)
            learning = active.new if isinstance(edit.scheme, Blend) else active
            for path, part in () if learning is None else learning.named_modules():
                tensors |= {
                    f"{edit.path}.{path}.{name}": (part, name) for name, _ in part.named_parameters(recurse=False)
                }
        elif isinstance(edit, BlendTable) and module.new is not None:
            tensors[edit.path] = module, "new"
        elif isinstance(edit, ReplaceTable):
            tensors[edit.path] = module, rows_name(module)
    return tensors


def _fill(into: dict[str, tuple[nn.Module, str]], values: dict[str, torch.Tensor]) -> None:
    """Put `values` into modules: parameters of the same shape themselves, which an optimizer continues to train."""
    with torch.no_grad():
        for key, value in values.items():
            tensor = getattr(*into[key])
            if isinstance(value, nn.Parameter) and value.shape == tensor.shape and not tensor.is_meta:
                setattr(*into[key], value)
                continue
            rows = tensor if tensor.shape == value.shape else tensor[-len(value) :]  # others are before position 0
            rows.copy_(value)
            tensor.requires_grad_(value.requires_grad)


def logit_scale_of(model: PreTrainedModel) -> float:
    """Return c of a model that was patched with `NoPE(logit_scale=...)` or `RNoPE(logit_scale=...)`.

    Raises:
        NotPatchedError: it carries no such swap.
    """
    return _plan_with_scale(model)[2]


@alone(parameters=False)
def set_logit_scale(model: PreTrainedModel, logit_scale: float) -> None:
    """Set c of 1 + c ln s, which multiplies the attention scores of layers without positions, and update the record.

    Args:
        model: patched with `NoPE(logit_scale=...)` or `RNoPE(logit_scale=...)`, where 0 has no effect; or a PEFT
            model around one.
        logit_scale: c >= 0, see `fit_logit_scale`.

    Raises:
        NotPatchedError: the model carries no such swap.
        SchemeError: an impossible c.
        ModelInUseError: a forward of the model is running, or another thread changes it.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import NoPE, patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> model = patch_model(model, NoPE(logit_scale=0.0))
        >>> set_logit_scale(model, 0.2)
        >>> logit_scale_of(model), model.config.posswap["scheme"]["logit_scale"]
        (0.2, 0.2)
    """
    target = unwrap(model)
    plan, old, _ = _plan_with_scale(model)
    scheme = dataclasses.replace(old, logit_scale=logit_scale)  # which checks it
    name = list(plan.schemes)[-1]  # of the stack whose scheme the plan gives as its own
    for module in target.get_submodule(plan.sites.stack(name).entry).modules():
        if isinstance(module, NoPEMechanism) and module.scheme.logit_scale is not None:
            module.scheme = dataclasses.replace(module.scheme, logit_scale=scheme.logit_scale)
    _set_schemes(target, {**plan.schemes, name: scheme})


def _plan_with_scale(model: PreTrainedModel) -> tuple[SwapPlan, NoPE | RNoPE, float]:
    target = unwrap(model)
    patch = getattr(target, "_posswap", None)
    scheme = None if patch is None else patch.plan.scheme
    if patch is None or not isinstance(scheme, NoPE | RNoPE) or scheme.logit_scale is None:
        carried = "no swap" if scheme is None else str(scheme)
        raise NotPatchedError(
            f"{type(target).__name__} carries {carried}: no logit scale of it can be set. Patch it with "
            "NoPE(logit_scale=0.0) or RNoPE(logit_scale=0.0), each by itself: their scale can."
        )
    return patch.plan, scheme, scheme.logit_scale
