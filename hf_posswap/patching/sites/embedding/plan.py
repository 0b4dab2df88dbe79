"""Planning the embedding site: the edits of a table of positions, or of the table of patches of a vision stack."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from hf_posswap.compat.accelerate_state import offloading_hooks
from hf_posswap.compat.peft_wrappers import is_adapted
from hf_posswap.compat.torch_tensors import holds_values, is_plain
from hf_posswap.compat.transformers_models import unsaved_keys
from hf_posswap.errors import SchemeError, UnsupportedSwapError
from hf_posswap.families.modules import get, has_buffer, join, tensor_at
from hf_posswap.families.rope_config import config_at
from hf_posswap.families.sites import PatchTable, TokenTable
from hf_posswap.patching.edits.edit import Edit, PlanDraft, SwapContext
from hf_posswap.patching.edits.restore import stored
from hf_posswap.patching.edits.settings import SetAttribute
from hf_posswap.patching.record.model_class import native_skeleton
from hf_posswap.patching.sites.embedding.patch_edits import (
    AnyImageSize,
    RemovePatchTable,
    ReplacePatchTable,
    SetRowIds,
)
from hf_posswap.patching.sites.embedding.table_edits import (
    BlendTable,
    GuardLength,
    RemoveTable,
    RemoveTableBuffer,
    ReplaceTable,
    SaveKeys,
)
from hf_posswap.schemes.base import Scheme
from hf_posswap.schemes.blend import Blend
from hf_posswap.schemes.common.table import GridTable, TableScheme
from hf_posswap.schemes.learned import Learned2D


def plan_embedding(context: SwapContext) -> PlanDraft:
    """Return the edits of the table of a stack (replace, resize, blend, remove) and of its length guard.

    Raises:
        UnsupportedSwapError: the scheme needs a table that is missing, or cannot be written.
    """
    scheme, table = context.scheme, context.stack.table
    if isinstance(table, PatchTable):
        return plan_patch_table(context, table)
    if isinstance(scheme, Blend):
        return _blend(context, scheme, table)
    if scheme.table_part is not None:
        return _replace(context, scheme.table_part)
    if context.stack.rotary and context.stack.inside is None:
        return PlanDraft()
    if table is None:
        return _guard(context, capacity=None)
    stays = context.stack.inside is None and not scheme.acts_inside and context.site == "auto"
    return _remove(context, table, rows=context.length + table.offset if stays else None)


def _replace(context: SwapContext, scheme: TableScheme) -> PlanDraft:
    table = _writable(context, scheme)
    rows, geometry = scheme.rows(context.geometry, context.length), context.geometry
    spec, config = context.stack.spec, context.model.config
    pads = spec.traits is None or spec.traits.closed is None or spec.traits.closed(config) is not None
    blocks: Any = getattr(config, spec.table.padded_to, 1) if spec.table is not None and pads else 1
    block = max(blocks) if isinstance(blocks, list | tuple) else blocks
    if rows != geometry.original_length and rows % block:
        raise SchemeError(
            f"{scheme.name}: {context.model_name} pads each text to a multiple of {block} tokens, and its table must "
            f"have rows for them, got max_length={rows}. Give {rows + -rows % block}."
        )
    replace = ReplaceTable(
        site="embedding",
        path=table.path,
        before=_before(context, table),
        after=f"{scheme.name}, {rows} positions",
        stack=context.stack.name,
        scheme=scheme,
        rows=rows,
        offset=table.offset,
        geometry=geometry,
    )
    draft = PlanDraft(edits=[replace]) + _guard(context, capacity=rows)
    if context.scheme.acts_inside:
        return draft + _conceal(context, table, rows + table.offset)
    grown = (rows - geometry.original_length) * geometry.row_width
    if grown > 0 and scheme.trainable:
        draft.added[f"{table.path}.weight (new rows)"] = grown
    return draft


def _conceal(context: SwapContext, table: TokenTable, rows: int) -> PlanDraft:
    """Keep a table along with another mechanism, under a key that stock classes do not know."""
    path = table.path
    conceal = BlendTable(
        site="embedding",
        path=path,
        before=f"{path}.weight",
        after=f"{path}.old, unknown to stock classes",
        stack=context.stack.name,
        scheme=None,
        share=0.0,
        offset=table.offset,
        geometry=context.geometry,
    )
    unused = {f"{path}.weight": context.model.get_submodule(path).weight.numel()}
    return PlanDraft(edits=[conceal], unused=unused, added={f"{path}.old": rows * context.geometry.row_width})


def _remove(context: SwapContext, table: TokenTable, rows: int | None) -> PlanDraft:
    path, draft = table.path, PlanDraft()
    if table.computed:  # it is in no checkpoint, so stock classes would not miss it
        rows, draft.plugin = None, True
    else:
        draft.unused[f"{path}.weight"] = context.model.get_submodule(path).weight.numel()
    text: dict[str, Any] = {
        "site": "embedding",
        "path": path,
        "before": _before(context, table),
        "after": "nothing added",
        "stack": context.stack.name,
    }
    if has_buffer(context.model, path):
        draft.edits.append(RemoveTableBuffer(**text))
    else:
        draft.edits.append(RemoveTable(**text, rows=rows, computed=table.computed))
    return draft + _guard(context, capacity=None)


def _blend(context: SwapContext, scheme: Blend, table: TokenTable | None) -> PlanDraft:
    new = scheme.new.table_part
    if table is None or (new is not None and context.site == "attention"):
        if new is not None:
            _writable(context, new)  # raises the reason
        return PlanDraft(plugin=True)
    _refuse_computed(context, scheme, table)
    if new is not None and new.rows(context.geometry, context.length) != context.geometry.original_length:
        raise UnsupportedSwapError(f"{scheme}: both tables must have the same number of positions.")
    _refuse_not_plain(context, table.path, scheme.name)
    path, rows = table.path, context.model.get_submodule(table.path).weight.numel()
    blend = BlendTable(
        site="embedding",
        path=path,
        before=_before(context, table),
        after="faded" if new is None else f"blended with {new.name}",
        stack=context.stack.name,
        scheme=new,
        share=scheme.weight,
        offset=table.offset,
        geometry=context.geometry,
    )
    draft = PlanDraft(edits=[blend], unused={f"{path}.weight": rows}, added={f"{path}.old": rows}, plugin=True)
    if new is not None and new.trainable:
        draft.added[f"{path}.new"] = context.geometry.original_length * context.geometry.row_width
    return draft + _guard(context, capacity=context.geometry.original_length)


def _guard(context: SwapContext, capacity: int | None) -> PlanDraft:
    """Guard the length if the table has an end, or if buffers must grow."""
    stack = context.stack
    if capacity is None and not stack.buffers:
        return PlanDraft()
    padded_to = "" if stack.spec.table is None else stack.spec.table.embeds_padded_to
    blocks = getattr(context.model.config, padded_to, 1) if padded_to else 1
    guard = GuardLength(
        site="embedding",
        path=stack.entry or "(model)",
        before="no length check",
        after=f"raises PositionRangeError beyond {capacity}" if capacity else "buffers that grow with the length",
        stack=stack.name,
        entry=stack.entry,
        capacity=capacity,
        offset=stack.table_offset,
        first=stack.first_position,
        buffers=stack.buffers,
        length=context.length,
        block=max(blocks) if isinstance(blocks, list | tuple) else blocks,
    )
    return PlanDraft(edits=[guard])


def plan_saved_tables(contexts: list[SwapContext], draft: PlanDraft) -> PlanDraft:
    """Return the edit that saves tables which the model's class excludes from checkpoints because it computes them."""
    context = contexts[-1]
    ignored = unsaved_keys(type(context.model))
    paths = (stack.table.path for stack in context.sites.stacks if isinstance(stack.table, TokenTable))
    keys = tuple(f"{path}.weight" for path in paths if f"{path}.weight" in ignored)
    if not keys:
        return PlanDraft()
    edit = SaveKeys(
        site="embedding",
        path=", ".join(keys),
        before="not saved",
        after="saved",
        stack=context.stack.name,
        keys=keys,
    )
    return PlanDraft(edits=[edit])


def fitted(context: SwapContext) -> Scheme:
    """Return the scheme of `context` with its table fitted to the old table's weights.

    If these cannot be read (on meta, fake, or in a form that the site refuses anyway), return it unchanged.
    """
    scheme, table = context.scheme, context.scheme.table_part
    old = _old_rows(context)
    if table is None or old is None or not holds_values(old):
        return scheme
    if ("images" in type(table).inputs) != isinstance(context.stack.table, PatchTable):
        return scheme  # one is for tokens and one for patches: planning refuses them
    if isinstance(context.stack.table, PatchTable):
        return scheme.with_table(table.fit(old, context.geometry))
    rows = table.rows(context.geometry, context.length)
    return scheme.with_table(table.fit(old, rows, context.geometry))


def _old_rows(context: SwapContext) -> Tensor | None:
    """Return the position rows of the old table, [P, E]; None if they are missing or not plain floats."""
    table = context.stack.table
    if table is None:
        return None
    if isinstance(table, PatchTable):
        rows = tensor_at(context.model, table.path)
        plain = None if rows is None else rows.flatten(0, -2)
    else:
        plain = _plain_weight(get(context.model, table.path))
    if plain is None or not plain.is_floating_point():
        return None
    return plain.detach()[context.stack.first_row :]


def _plain_weight(module: nn.Module | None) -> Tensor | None:
    """Return the weight of a table's `module`; None if it has none, or an adapted or quantised one."""
    if module is None or is_adapted(module) or not hasattr(module, "weight"):
        return None
    weight = stored(module, "weight")
    return weight if is_plain(weight) else None


def _before(context: SwapContext, table: TokenTable) -> str:
    return f"{table.kind} table, {context.geometry.original_length} positions"


def _writable(context: SwapContext, scheme: TableScheme) -> TokenTable:
    """Return the table that a table scheme replaces.

    Raises:
        UnsupportedSwapError: another site was requested, or the table cannot be written.
    """
    table = context.stack.table
    if not isinstance(table, TokenTable) or context.site == "attention":
        raise UnsupportedSwapError(
            f"{scheme.name} needs a position table, but site='attention' was requested for "
            f"{context.model_name}. What works: rope and its scalings, alibi, and in a causal model nope."
        )
    _refuse_computed(context, scheme, table)
    _refuse_not_plain(context, table.path, scheme.name)
    return table


def _refuse_computed(context: SwapContext, scheme: Scheme, table: TokenTable) -> None:
    if table.computed:
        raise UnsupportedSwapError(
            f"{scheme.name} needs a table in checkpoints, and {context.model_name} computes its "
            "sinusoids, for any length, and saves none. What works: rope and its scalings, alibi."
        )


def _refuse_not_plain(context: SwapContext, path: str, scheme: str) -> None:
    """Refuse to write rows into a position table that is adapted by PEFT, or quantised."""
    table = context.model.get_submodule(path)
    if is_adapted(table):
        raise UnsupportedSwapError(
            f"{path!r} carries a PEFT adapter ({type(table).__name__}), and {scheme} writes new rows into the "
            "table beneath it. What works: patch first, then add the adapter; or merge_and_unload() before."
        )
    weight = table.weight
    if not weight.is_floating_point() or not is_plain(weight):
        raise UnsupportedSwapError(
            f"{path!r} is quantised ({type(weight).__name__} of {weight.dtype}), and {scheme} writes new rows. What "
            "works: patch first, then quantise; or quantise only the linear layers, as is usual."
        )


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
    grid_table = scheme if isinstance(scheme, GridTable) else None
    draft = _remove_patches(context, table) if grid_table is None else _replace_patches(context, table, grid_table)
    native_size = context.geometry.image_size if grid_table is None else grid_table.filled("image_size")
    assert native_size is not None
    any_size = AnyImageSize(
        site="embedding",
        path=table.embeddings,
        before="one image size",
        after="images of any size",
        stack=context.stack.name,
        table=table.path.removeprefix(f"{table.embeddings}."),
        scheme=grid_table,
        geometry=context.geometry,
        native=native_size,
        square=table.square_head,
    )
    towers = (tower for tower in context.sites.family.kept if get(context.model, tower) is not None)
    notes = [f"{context.model_name} reads text too: {tower} keeps its positions." for tower in towers]
    return draft + PlanDraft(edits=[any_size], notes=notes, adaptation=_kept_or_resized(context))


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


def _replace_patches(context: SwapContext, table: PatchTable, scheme: GridTable) -> PlanDraft:
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
        before=f"learned table, {_shape(geometry.grid())}",
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


def _remove_patches(context: SwapContext, table: PatchTable) -> PlanDraft:
    geometry = context.geometry
    remove = RemovePatchTable(
        site="embedding",
        path=table.path,
        before=f"learned table, {_shape(geometry.grid())}",
        after="nothing added to patches",
        stack=context.stack.name,
        geometry=geometry,
        native=not context.scheme.acts_inside,
    )
    rows, columns = geometry.grid()
    unused = {f"{table.path} (rows of patches)": rows * columns * geometry.hidden_size}
    return PlanDraft(edits=[remove], unused=unused)


def _followed(context: SwapContext, table: PatchTable, values: dict[str, object]) -> Iterator[Edit]:
    """Yield edits for the attributes of the image embeddings that differ in a stock model of another image size."""
    model, trial = context.model, copy.deepcopy(context.model.config)
    for name, value in values.items():
        parent, _, leaf = name.rpartition(".")
        setattr(config_at(trial, parent), leaf, value)
    as_it_was, fresh = native_skeleton(model, copy.deepcopy(model.config)), native_skeleton(model, trial)
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


def _shape(grid: tuple[int, int]) -> str:
    return f"{grid[0]} x {grid[1]} patches"
