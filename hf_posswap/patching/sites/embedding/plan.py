"""Planning the embedding site: the edits of the position table of a stack."""

from __future__ import annotations

from typing import Any

from hf_posswap.compat.peft_wrappers import is_adapted
from hf_posswap.compat.torch_fake import is_plain
from hf_posswap.compat.transformers_models import unsaved_keys
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.images import PatchTable
from hf_posswap.families.modules import has_buffer
from hf_posswap.families.sites import TokenTable
from hf_posswap.patching.edits.context import PlanDraft, SwapContext
from hf_posswap.patching.sites.embedding.length import GuardLength
from hf_posswap.patching.sites.embedding.patch_plan import plan_patch_table
from hf_posswap.patching.sites.embedding.table_edits import (
    BlendTable,
    RemoveTable,
    RemoveTableBuffer,
    ReplaceTable,
    SaveKeys,
)
from hf_posswap.schemes.base import Scheme
from hf_posswap.schemes.blend import Blend
from hf_posswap.schemes.common.table import TableScheme


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
    )
    return PlanDraft(edits=[guard])


def plan_saved_tables(context: SwapContext) -> PlanDraft:
    """Return the edit that saves tables which the model's class excludes from checkpoints because it computes them."""
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
            f"{context.model_name}. What works: rope and its scalings, alibi, nope."
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
    table: Any = context.model.get_submodule(path)
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
