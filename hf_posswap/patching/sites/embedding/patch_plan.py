"""Planning the embedding site of a stack that sees images: what becomes of its table of patches."""

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
    """Return what becomes of a table of patches, and that images of any size find their rows.

    Raises:
        UnsupportedSwapError: the model's config cannot say the image size, or the scheme is not for that site.
    """
    scheme = context.scheme
    if context.site == "attention" and not scheme.acts_inside:
        raise UnsupportedSwapError(
            f"{scheme.name} does not act inside attention, and {context.model_name} was asked for at the attention "
            "site. What works: rope_2d, alibi_2d."
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
    """Refuse a table that is not held by its own module as numbers: what a swap writes would not be what is read."""
    weight = tensor_at(context.model, table.path)
    for path in dict.fromkeys((table.embeddings, table.path.rpartition(".")[0])):
        module = context.model.get_submodule(path)
        if any(offloading_hooks(module)):
            kept = "is offloaded by accelerate", "patch the model first and dispatch it then"
        elif is_adapted(module):
            kept = "carries an adapter of PEFT", "patch first and add the adapter then, or merge_and_unload() before"
        elif weight is not None and not weight.is_floating_point():
            kept = "is quantised", "patch first and quantise then"
        else:
            continue
        raise UnsupportedSwapError(
            f"{path!r} {kept[0]}, and {context.scheme.name} changes the table in it. What works: {kept[1]}."
        )


def _kept_or_resized(context: SwapContext) -> str:
    """Return what training a model with a table that was kept, or resized, will need; "": the scheme does neither."""
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
                f"{scheme.name}: image_size {size[0]} x {size[1]} cannot be said in the config of "
                f"{context.model_name}, which takes square images alone. What works: a square image_size; images of "
                "other shapes run after the swap in any case."
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
    """Yield what a stock model of another image size has otherwise, where it makes tokens of an image."""
    model, trial = context.model, copy.deepcopy(context.model.config)
    for name, value in values.items():
        part, _, leaf = name.rpartition(".")
        setattr(config_at(trial, part), leaf, value)
    with torch.device("meta"), without_initialising():
        as_it_was, fresh = build_native(model, copy.deepcopy(model.config)), build_native(model, trial)
    text: dict[str, Any] = {"site": "embedding", "stack": context.stack.name}
    for path, module in fresh.get_submodule(table.embeddings).named_modules(prefix=table.embeddings):
        for name, new in vars(module).items():
            old, before = (vars(one.get_submodule(path)).get(name) for one in (model, as_it_was))
            if isinstance(new, int | tuple | list) and not name.startswith("_") and new not in (old, before):
                where = f"{path}.{name}"
                yield SetAttribute(
                    **text, path=where, before=str(old), after=str(new), module=path, name=name, value=new
                )
    if table.ids is not None:
        count, held = fresh.get_buffer(table.ids).shape[-1], model.get_buffer(table.ids).shape[-1]
        yield SetRowIds(**text, path=table.ids, before=f"{held} rows", after=f"{count} rows", count=count)


def _before(geometry: Geometry) -> str:
    return f"learned table, {_shape(geometry.grid())}"


def _shape(grid: tuple[int, int]) -> str:
    return f"{grid[0]} x {grid[1]} patches"
