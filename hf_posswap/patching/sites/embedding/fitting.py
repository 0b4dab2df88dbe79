"""Fitting a table scheme to the weights of the table that it replaces, such as their scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_posswap.compat.peft_wrappers import is_adapted
from hf_posswap.compat.torch_fake import holds_values, is_plain
from hf_posswap.families.images import PatchTable, tensor_at
from hf_posswap.families.modules import get
from hf_posswap.patching.edits.context import SwapContext
from hf_posswap.patching.edits.offload import stored
from hf_posswap.schemes.base import Scheme


def fitted(context: SwapContext) -> Scheme:
    """Return the scheme of `context` with its table fitted to the old table's weights.

    If these cannot be read (on meta, fake, or in a form that the site refuses anyway), return it unchanged.
    """
    scheme, table = context.scheme, context.scheme.table_part
    old = _old_rows(context)
    if table is None or old is None or not holds_values(old) or not _fits(table, context):
        return scheme
    if isinstance(context.stack.table, PatchTable):
        return scheme.with_table(table.fit(old, context.geometry))
    rows = table.rows(context.geometry, context.length)
    return scheme.with_table(table.fit(old, rows, context.geometry))


def unfitted(table: Any, old: Tensor, fit: Callable[[Tensor], Any]) -> str | None:
    """Return why the resolved `table` cannot replace `old` [P, E] yet, because `old` has no values; or None.

    Args:
        table: a scheme.
        old: the table that it replaces.
        fit: returns `table` fitted to a table of that shape.
    """
    if holds_values(old) or table == fit(torch.ones(old.shape, dtype=old.dtype)):
        return None
    return f"{table} needs a value from the old table's weights, and this model's are on meta or fake."


def _fits(table: Any, context: SwapContext) -> bool:
    """Return whether `table` and the model's table are both for tokens or both for patches; planning refuses others."""
    return ("images" in type(table).inputs) == isinstance(context.stack.table, PatchTable)


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
