"""Patching a model and taking it back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from hf_posswap.errors import NotPatchedError, SchemeError
from hf_posswap.families.rope_config import config_parts
from hf_posswap.patching.actions import Undo
from hf_posswap.patching.attention import register_attention
from hf_posswap.patching.config_class import native_config_class, plugin_config_class
from hf_posswap.patching.image_actions import ReplaceGridTable
from hf_posswap.patching.offloaded import bring_into_memory, offloaded_tables, stored
from hf_posswap.patching.plan import RelativeChoice, SchemeChoice, SiteChoice, SwapPlan, plan_swap, unwrap
from hf_posswap.patching.table_actions import ReplaceTable
from hf_posswap.patching.verify import check_structure, check_untouched, fingerprint
from hf_posswap.patching.wrapped import refuse_wrapped_parts
from hf_posswap.schemes.base import Scheme, make_scheme
from hf_posswap.schemes.grid_table import GridTable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

M = TypeVar("M", bound=nn.Module)


@dataclass
class Patch:
    """What a patched model carries, in `model._posswap`.

    Attributes:
        plan: that was carried out.
        undo: what takes it back, in order; empty for a model that was loaded swapped.
        config: the model's config from before the swap; the model has a copy of its own since.
    """

    plan: SwapPlan
    undo: list[Undo]
    config: Any


def patch_model(
    model: PreTrainedModel,
    scheme: SchemeChoice,
    *,
    max_length: int | None = None,
    site: SiteChoice = "auto",
    relative: RelativeChoice | None = None,
    **options: Any,
) -> SwapPlan:
    """Swap the position mechanism of `model`, in place, and return the plan that was carried out.

    Everything is checked before anything is touched; afterwards the change is proved (`verify_swap` proves more). Only
    this instance changes: no class and no module of transformers does.

    Args:
        model: a transformers model, or a PEFT model around one.
        scheme: an object, or a name with its fields as `options`: see `list_schemes()`. An encoder-decoder has it in
            both stacks; a mapping, {"encoder": ..., "decoder": ...}, says otherwise, and leaves out what is to stay.
        max_length: positions the swapped model is meant for, in tokens; None keeps the model's own (or what a given
            factor reaches).
        site: "auto" expresses the swap natively where it can be; "attention" always applies it inside attention.
        relative: whether DeBERTa's relative positions inside attention stay beside the scheme, "keep", or go, "drop";
            None keeps them, and is all that other models take.
        options: fields of the scheme, where it is given by name.

    Raises:
        UnsupportedSwapError: this scheme cannot be put into this model: why, and what would work.
        UnsupportedModelError: no family describes the model.
        SchemeError, OptionError, UnknownNameError: the scheme or its parameters are wrong.
        AlreadyPatchedError: the model carries a swap.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> patch_model(model, "alibi", max_length=64).route
        'plugin'
        >>> import torch
        >>> model(torch.zeros(1, 64, dtype=torch.long)).logits.shape
        torch.Size([1, 64, 11])
    """
    target = unwrap(model)
    asked: dict[str, Any] = {"max_length": max_length, "site": site, "relative": relative}
    plan = plan_swap(target, scheme, **asked, **options)
    fitted = {name: _fit(target, plan, name) for name, one in plan.schemes.items() if one.table_part is not None}
    if fitted:
        plan = plan_swap(target, replace(plan, schemes=plan.schemes | fitted).choice, **asked)
    carry_out(target, plan, owner=model)
    return plan


def carry_out(model: Any, plan: SwapPlan, owner: nn.Module | None = None) -> None:
    """Apply `plan`, which was made for `model`, or leave the model as it was.

    Args:
        model: the transformers model.
        plan: for it.
        owner: what wraps the model (a PEFT model), so that it sees the new config too.
    """
    register_attention()
    before = fingerprint(model)
    patch = Patch(plan, [], model.config)
    try:
        _set_config(owner or model, model.config, _own_config(model.config, plan))
        patch.undo += [bring_into_memory(model, path) for path in offloaded_tables(model, plan.edits)]
        for edit in plan.edits:
            edit.action.apply(model, patch.undo)
        model._posswap = patch
        check_structure(model)
        check_untouched(model, before)
    except BaseException:
        _undo(model, patch, owner)
        raise


def unpatch_model(model: M) -> M:
    """Give `model` back its original mechanism, bit for bit, and return it.

    Weights trained since the swap stay as they are; what the swap had put out of use comes back as it was.

    Raises:
        NotPatchedError: the model carries no swap, or was loaded from a swapped checkpoint, which does not hold the
            original mechanism's weights.
    """
    target: Any = unwrap(model)
    patch = getattr(target, "_posswap", None)
    if patch is None:
        raise NotPatchedError(f"{type(target).__name__} carries no swap: nothing to undo.")
    if not patch.undo:
        raise NotPatchedError(
            f"{type(target).__name__} was loaded from a checkpoint saved after the swap to {patch.plan.named}: "
            "the original mechanism is not in it. Load the base checkpoint instead."
        )
    refuse_wrapped_parts(target)
    _undo(target, patch, owner=model)
    return model


@contextmanager
def patched(model: M, scheme: SchemeChoice, **options: Any) -> Iterator[M]:
    """Swap inside a `with` block; takes the same arguments as `patch_model`.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> with patched(model, "rope"):
        ...     type(model.transformer.wpe).__name__
        'NoPositions'
        >>> type(model.transformer.wpe).__name__
        'Embedding'
    """
    patch_model(model, scheme, **options)  # type: ignore[arg-type]
    try:
        yield model
    finally:
        unpatch_model(model)


def _undo(model: Any, patch: Patch, owner: nn.Module | None) -> None:
    for path in offloaded_tables(model, patch.plan.edits):  # which was done since
        bring_into_memory(model, path)
    for step in patch.undo:
        step(model)
    _set_config(owner or model, model.config, patch.config)
    model.__dict__.pop("_posswap", None)


def _own_config(config: Any, plan: SwapPlan) -> Any:
    """Return a copy of `config` for the swapped model alone: models built from one config object share it."""
    own = copy.deepcopy(config)
    own.posswap = plan.record.to_dict()
    if plan.route == "plugin":
        own.__class__ = plugin_config_class(native_config_class(config))
    return own


def _set_config(owner: nn.Module, old: Any, new: Any) -> None:
    """Give `owner` and all in it `new` for `old`, and the configs inside the one for those inside the other."""
    before, after = config_parts(old), config_parts(new)
    instead = {id(part): after[path] for path, part in before.items() if path in after}
    module: Any
    for module in owner.modules():
        held = vars(module).get("config")
        if id(held) in instead:
            module.config = instead[id(held)]


def _fit_grid(model: Any, plan: SwapPlan, stack: str) -> Scheme:
    """Return what `_fit` does, of a table of patches."""
    scheme: Any = plan.schemes[stack]
    action = next(e.action for e in plan.edits if e.stack == stack and isinstance(e.action, ReplaceGridTable))
    old = action.old(model)
    if not old.is_meta:
        return scheme.fit(old, action.geometry)
    if scheme != scheme.fit(old.new_ones(old.shape, device="cpu"), action.geometry):
        raise SchemeError(f"{scheme} takes a value from the old table's weights, and this model's are on meta.")
    return scheme


def _fit(model: Any, plan: SwapPlan, stack: str) -> Scheme:
    """Return the scheme of a stack with what its table takes from the old one's weights filled in."""
    whole = plan.schemes[stack]
    scheme = whole.table_part
    if isinstance(scheme, GridTable):
        return _fit_grid(model, plan, stack)
    action = next(e.action for e in plan.edits if e.stack == stack and isinstance(e.action, ReplaceTable))
    weight = stored(model.get_submodule(action.path), "weight")
    if weight.is_meta:
        if make_scheme(scheme.to_dict()) != scheme.fit(weight.new_ones(weight.shape, device="cpu"), action.geometry):
            raise SchemeError(f"{scheme} takes a value from the old table's weights, and this model's are on meta.")
        return whole
    return whole.with_table(scheme.fit(weight.detach()[action.offset :], action.geometry))
