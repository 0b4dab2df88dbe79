"""What follows the length of a model besides its tables: masks, plain attributes, what its class leaves unsaved."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.sites import Sites
from hf_posswap.patching.actions import Action, SetAttribute
from hf_posswap.patching.embedding import is_mask
from hf_posswap.patching.interface import Resize
from hf_posswap.patching.rotary import changed_settings
from hf_posswap.patching.show import brief
from hf_posswap.patching.table_actions import GrowMask, SaveKeys

LENGTH_NAMES = (
    "max_position_embeddings",
    "max_target_positions",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
)
"""Config values that say how long a model is."""
Draft = tuple[str, str, str, str, Action]
"""An edit: site, path, before, after, action."""


def saved_tables(model: Any, sites: Sites) -> Iterator[Draft]:
    """Yield the edit that saves tables which the model's class leaves out, because it can compute what it had there."""
    ignored = getattr(type(model), "_keys_to_ignore_on_save", None) or ()
    keys = tuple(f"{path}.weight" for path in table_paths(sites) if f"{path}.weight" in ignored)
    if keys:
        yield "embedding", ", ".join(keys), "not saved", "saved", SaveKeys(keys)


def followed(model: Any, sites: Sites, values: dict[str, Any], unread: set[str]) -> tuple[list[Draft], bool]:
    """Return the edits that give `model` what a stock one of the new length has, and whether weights stay as they are.

    Where a stock model of that length would have other weights, besides the tables, no config says the swap.

    Args:
        model: not touched.
        sites: of it.
        values: config values of the plan.
        unread: paths of attention modules whose own masks are read no more.

    Raises:
        UnsupportedSwapError: a buffer follows the length, and its family does not say how.
    """
    from transformers.initialization import no_init_weights

    lengths = {name: value for name, value in values.items() if name in LENGTH_NAMES}
    if sites.rotary or all(getattr(model.config, name) == value for name, value in lengths.items()):
        return [], True
    trial = copy.deepcopy(model.config)
    for name, value in lengths.items():
        setattr(trial, name, value)
    cls = getattr(type(model), "posswap_native", type(model))
    with torch.device("meta"), no_init_weights():  # which would cost most of the time
        fresh, as_it_was = cls(trial), cls(copy.deepcopy(model.config))
    found = list(_masks(model, fresh, sites, unread))
    tables = {f"{path}.weight" for path in table_paths(sites)}
    # not with the model itself, whose weights may be adapted by PEFT, or quantised
    if _shapes(fresh, tables) != _shapes(as_it_was, tables):
        return found, False
    for path, name, old, new in changed_settings(model, fresh, table_paths(sites)):
        edit = SetAttribute(path, name, old, new)
        found.append(("embedding", f"{path}.{name}".lstrip("."), brief(old), brief(new), edit))
    return found, True


def _masks(model: Any, fresh: Any, sites: Sites, unread: set[str]) -> Iterator[Draft]:
    """Yield causal masks of the new length; what else follows the length, the family must say how."""
    own, grown = dict(model.named_buffers()), {path for stack in sites.stacks for path in stack.buffers}
    for name, buffer in fresh.named_buffers():
        owner = name.rpartition(".")[0]
        of_table = bool({name, owner} & set(table_paths(sites)))
        if name not in own or own[name].shape == buffer.shape or name in grown or of_table:
            continue
        shapes = list(own[name].shape), list(buffer.shape)
        if owner in unread:
            yield "attention", name, str(shapes[0]), f"{shapes[1]}, read no more", Resize(name, tuple(buffer.shape))
        elif is_mask(buffer) and is_mask(own[name]):
            before, after = (f"mask of {shape[-1]} positions" for shape in shapes)
            yield "embedding", name, before, after, GrowMask(name, buffer.shape[-1])
        else:
            raise UnsupportedSwapError(
                f"buffer {name!r} of {type(model).__name__} follows the length, {shapes[0]} would be {shapes[1]}, and "
                f"family {sites.family.name!r} does not say how. What works: the length that the model has."
            )


def table_paths(sites: Sites) -> tuple[str, ...]:
    """Return the paths of the tables of all stacks."""
    return tuple(stack.table for stack in sites.stacks if stack.table)


def _shapes(model: Any, left_out: set[str]) -> dict[str, Any]:
    return {name: tensor.shape for name, tensor in model.state_dict().items() if name not in left_out}
