"""State besides the tables that follows the length of a model: masks, plain attributes, unsaved buffers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Size, Tensor

from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.sites import Sites, TokenTable
from hf_posswap.patching.edits.edit import Edit, PlanDraft, SwapContext
from hf_posswap.patching.edits.settings import GrowMask, ResizeBuffer, is_mask, setting_edits, settings_to_follow
from hf_posswap.patching.record.model_class import native_skeleton
from hf_posswap.patching.sites.attention.native import AttendThroughInterface, StopRotation

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTH_NAMES = (
    "max_position_embeddings",
    "max_target_positions",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
)
"""Config values with the length of a model."""


def plan_length_state(contexts: list[SwapContext], draft: PlanDraft) -> PlanDraft:
    """Return the edits that make a model match a stock one of the new length, outside its tables.

    If a stock model of that length would have other weights besides the tables, no config can express the swap.

    Args:
        contexts: of the stacks, the main one last.
        draft: the plan so far.

    Raises:
        UnsupportedSwapError: a buffer follows the length in an unknown way.
    """
    context = contexts[-1]
    model, sites = context.model, context.sites
    lengths = {name: value for name, value in draft.values.items() if name in LENGTH_NAMES}
    if sites.rotary or all(getattr(model.config, name) == value for name, value in lengths.items()):
        return PlanDraft()
    trial = copy.deepcopy(model.config)
    for name, value in lengths.items():
        setattr(trial, name, value)
    fresh, as_it_was = native_skeleton(model, trial), native_skeleton(model, copy.deepcopy(model.config))
    unread = {edit.path for edit in draft.edits if isinstance(edit, AttendThroughInterface)}
    stopped = {edit.path for edit in draft.edits if isinstance(edit, StopRotation)}
    planned = PlanDraft(edits=list(_masks(context, fresh, unread, stopped)))
    paths = table_paths(sites)
    # not compared with the model itself, whose weights may be adapted by PEFT or quantised
    if _shapes(fresh, paths) != _shapes(as_it_was, paths):
        planned.plugin = True
        planned.notes.append("Stock transformers would change other weights with the length.")
        return planned
    changed = settings_to_follow(model, as_it_was, fresh, (*paths, *stopped))
    return planned + PlanDraft(edits=setting_edits(changed, "embedding", context.stack.name))


def _masks(context: SwapContext, fresh: PreTrainedModel, unread: set[str], stopped: set[str]) -> Iterator[Edit]:
    """Yield edits for causal masks of the new length; the family must describe any other buffer that follows it.

    Args:
        context: of the model.
        fresh: a stock model of the new length.
        unread: paths of attention modules whose own masks are no longer used.
        stopped: paths of modules that only compute angles of position 0, whatever the length.
    """
    model, sites = context.model, context.sites
    current, grown = dict(model.named_buffers()), {path for stack in sites.stacks for path in stack.buffers}
    for name, buffer in fresh.named_buffers():
        owner = name.rpartition(".")[0]
        of_table = bool({name, owner} & set(table_paths(sites)))
        if name not in current or current[name].shape == buffer.shape or name in grown or of_table or owner in stopped:
            continue
        yield _resized(context, name, current[name], buffer, unread=owner in unread)


def _resized(context: SwapContext, name: str, old: Tensor, new: Tensor, *, unread: bool) -> Edit:
    shapes = list(old.shape), list(new.shape)
    if unread:
        return ResizeBuffer(
            site="attention",
            path=name,
            before=str(shapes[0]),
            after=f"{shapes[1]}, no longer used",
            stack=context.stack.name,
            shape=tuple(new.shape),
        )
    if is_mask(new) and is_mask(old):
        before, after = (f"mask of {shape[-1]} positions" for shape in shapes)
        return GrowMask(
            site="embedding", path=name, before=before, after=after, stack=context.stack.name, length=new.shape[-1]
        )
    raise UnsupportedSwapError(
        f"buffer {name!r} of {context.model_name} follows the length, {shapes[0]} would be {shapes[1]}, and "
        f"family {context.sites.family.name!r} does not describe how. What works: the model's current length."
    )


def table_paths(sites: Sites) -> tuple[str, ...]:
    """Return the paths of the tables of tokens in all stacks."""
    return tuple(stack.table.path for stack in sites.stacks if isinstance(stack.table, TokenTable))


def _shapes(model: PreTrainedModel, paths: tuple[str, ...]) -> dict[str, Size]:
    """Return the shape of each tensor of `model` except the tables at `paths`."""
    left_out = {f"{path}.weight" for path in paths}
    return {name: tensor.shape for name, tensor in model.state_dict().items() if name not in left_out}
