"""Planning the embedding site of a vision stack: the edits of its table of patches."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from hf_posswap.compat.accelerate_hooks import offloading_hooks
from hf_posswap.compat.peft_wrappers import is_adapted
from hf_posswap.compat.transformers_models import without_initialising
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.images import PatchTable, tensor_at
from hf_posswap.families.modules import get, join
from hf_posswap.families.rope_config import config_at
from hf_posswap.geometry import Geometry
from hf_posswap.patching.edits.context import PlanDraft, SwapContext
from hf_posswap.patching.edits.edit import Edit
from hf_posswap.patching.edits.settings import SetAttribute
from hf_posswap.patching.record.building import build_native
from hf_posswap.patching.sites.embedding.patch_edits import (
    AnyImageSize,
    RemovePatchTable,
    ReplacePatchTable,
    SetRowIds,
)
from hf_posswap.schemes.common.grid_table import GridTable
from hf_posswap.schemes.learned_2d import Learned2D


def plan_patch_table(context: SwapContext, table: PatchTable) -> PlanDraft:
    """Return the edits of a table of patches, and the edit that supports images of any size.

    Raises:
        UnsupportedSwapError: the model's config cannot express the image size, or the scheme is not for that site.
    """
    scheme = context.scheme
    if context.site == "attention" and not scheme.acts_inside:
        raise UnsupportedSwapError(
            f"{scheme.name} does not act inside attention, but site='attention' was requested for "
            f"{context.model_name}. What works: rope_2d, alibi_2d."
        )
    _refuse_kept_elsewhere(context, table)
    draft = _replace(context, table, scheme) if isinstance(scheme, GridTable) else _remove(context, table)
    any_size = AnyImageSize(
        site="embedding",
        path=table.embeddings,
        before="one image size",
        after="images of any size",
        stack=context.stack.name,
        table=table.path.removeprefix(f"{table.embeddings}."),
        scheme=scheme if isinstance(scheme, GridTable) else None,
        geometry=context.geometry,
        native=_native_size(context),
        square=table.square_head,
    )
    towers = (tower for tower in context.sites.family.kept if get(context.model, tower) is not None)
    notes = [f"{context.model_name} reads text too: {tower} keeps its positions." for tower in towers]
    return draft + PlanDraft(edits=[any_size], notes=notes, adaptation=_kept_or_resized(context))


def _native_size(context: SwapContext) -> tuple[int, int]:
    """Return the image size in the config of the swapped model."""
    scheme = context.scheme
    size = scheme.filled("image_size") if isinstance(scheme, GridTable) else context.geometry.image_size
    assert size is not None
    return size


def _refuse_kept_elsewhere(context: SwapContext, table: PatchTable) -> None:
    """Refuse a table whose module does not read its plain weights: the rows that a swap writes would be ignored."""
    weight = tensor_at(context.model, table.path)
    for path in dict.fromkeys((table.embeddings, table.path.rpartition(".")[0])):
        module = context.model.get_submodule(path)
        if any(offloading_hooks(module)):
            kept = "is offloaded by accelerate", "patch the model first, then dispatch it"
        elif is_adapted(module):
            kept = "carries a PEFT adapter", "patch first, then add the adapter; or merge_and_unload() before"
        elif weight is not None and not weight.is_floating_point():
            kept = "is quantised", "patch first, then quantise"
        else:
            continue
        raise UnsupportedSwapError(
            f"{path!r} {kept[0]}, and {context.scheme.name} changes the table in it. What works: {kept[1]}."
        )


def _kept_or_resized(context: SwapContext) -> str:
    """Describe the training that a model with a kept or resized table needs; "": the scheme does neither."""
    scheme, geometry = context.scheme, context.geometry
    if not isinstance(scheme, Learned2D):
        return ""
    if scheme.grid(geometry) == geometry.grid():
        return "none: the table is kept"
    return "optional: usable untrained, better after a short training at the new image size"


def _replace(context: SwapContext, table: PatchTable, scheme: GridTable) -> PlanDraft:
    geometry, size, draft = context.geometry, scheme.filled("image_size"), PlanDraft()
    if size != geometry.image_size:
        if table.square_config and size[0] != size[1]:
            raise UnsupportedSwapError(
                f"{scheme.name}: image_size {size[0]} x {size[1]} cannot be expressed in the config of "
                f"{context.model_name}, which only has square images. What works: a square image_size; images of "
                "other shapes run after the swap anyway."
            )
        draft.values[join(context.stack.config, "image_size")] = size[0] if size[0] == size[1] else list(size)
    replace = ReplacePatchTable(
        site="embedding",
        path=table.path,
        before=_before(geometry),
        after=f"{scheme.name}, {_shape(scheme.grid(geometry))}",
        stack=context.stack.name,
        geometry=geometry,
        scheme=scheme,
    )
    draft.edits.append(replace)
    if draft.values:
        draft.edits += _followed(context, table, draft.values)
    rows, columns = scheme.grid(geometry)
    grown = (rows * columns + geometry.prefix_tokens - geometry.original_length) * geometry.hidden_size
    if grown > 0 and scheme.trainable:
        draft.added[f"{table.path} (new rows)"] = grown
    return draft


def _remove(context: SwapContext, table: PatchTable) -> PlanDraft:
    geometry = context.geometry
    remove = RemovePatchTable(
        site="embedding",
        path=table.path,
        before=_before(geometry),
        after="nothing added to patches",
        stack=context.stack.name,
        geometry=geometry,
        native=not context.scheme.acts_inside,
    )
    rows, columns = geometry.grid()
    unused = {f"{table.path} (rows of patches)": rows * columns * geometry.hidden_size}
    return PlanDraft(edits=[remove], unused=unused)


def _followed(context: SwapContext, table: PatchTable, values: dict[str, Any]) -> Iterator[Edit]:
    """Yield edits for the attributes of the image embeddings that differ in a stock model of another image size."""
    model, trial = context.model, copy.deepcopy(context.model.config)
    for name, value in values.items():
        parent, _, leaf = name.rpartition(".")
        setattr(config_at(trial, parent), leaf, value)
    with torch.device("meta"), without_initialising():
        as_it_was, fresh = build_native(model, copy.deepcopy(model.config)), build_native(model, trial)
    text: dict[str, Any] = {"site": "embedding", "stack": context.stack.name}
    for path, module in fresh.get_submodule(table.embeddings).named_modules(prefix=table.embeddings):
        for name, new in vars(module).items():
            old, before = (vars(source.get_submodule(path)).get(name) for source in (model, as_it_was))
            if isinstance(new, int | tuple | list) and not name.startswith("_") and new not in (old, before):
                where = f"{path}.{name}"
                yield SetAttribute(
                    **text, path=where, before=str(old), after=str(new), module=path, name=name, value=new
                )
    if table.ids is not None:
        count, current = fresh.get_buffer(table.ids).shape[-1], model.get_buffer(table.ids).shape[-1]
        yield SetRowIds(**text, path=table.ids, before=f"{current} rows", after=f"{count} rows", count=count)


def _before(geometry: Geometry) -> str:
    return f"learned table, {_shape(geometry.grid())}"


def _shape(grid: tuple[int, int]) -> str:
    return f"{grid[0]} x {grid[1]} patches"
