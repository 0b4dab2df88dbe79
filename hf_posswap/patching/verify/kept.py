"""Whether the scheme of a swapped model is, within the original length, the mechanism that it had before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_posswap.compat.peft_wrappers import original_of
from hf_posswap.families.sites import Stack
from hf_posswap.geometry import Geometry
from hf_posswap.patching.apply.applied import AppliedSwap
from hf_posswap.patching.edits.restore import stored
from hf_posswap.patching.sites.attention.edits import AddMechanism
from hf_posswap.patching.sites.attention.native import CopyRows, native_scheme
from hf_posswap.patching.sites.embedding.table_edits import ReplaceTable, rows_name
from hf_posswap.patching.sites.rotary.edits import NeutraliseRotary, RebuildRotary
from hf_posswap.patching.sites.rotary.modules import matches_within
from hf_posswap.schemes.base import Scheme
from hf_posswap.schemes.blend import Blend
from hf_posswap.schemes.layered import Layered
from hf_posswap.schemes.mechanism import Mechanism, by_head
from hf_posswap.schemes.rope import RotaryScheme
from hf_posswap.schemes.sum import Native, Sum, SumMechanism
from hf_posswap.schemes.together import Together


def is_kept(model: Any, swap: AppliedSwap, stack: Stack, positions: Tensor) -> bool:
    """Return whether the scheme of `stack` is, within the original length, the mechanism that it had before.

    Args:
        model: swapped.
        swap: of it.
        stack: of it.
        positions: [1, Q], from 0: what a sum adds counts only if it does something there.
    """
    plan, geometry = swap.plan, stack.geometry
    scheme = _at_work(plan.schemes[stack.name], model, swap, stack, positions)
    if plan.record.relative == "drop":
        return False
    if isinstance(scheme, Blend) and scheme.weight == 0:
        return True
    if scheme.keeps_native:
        return isinstance(scheme, Native)  # else what is added to it changes it
    first = next(edit for edit in plan.edits if edit.stack == stack.name)
    if isinstance(first, ReplaceTable) and not scheme.acts_inside:
        before = swap.saved_of(ReplaceTable, first.path)["weight"]
        table = model.get_submodule(first.path)
        now = stored(table, rows_name(table))
        rows = min(len(before), len(now))
        return torch.equal(before[:rows].to(now), now[:rows])
    if stack.inside is not None:
        learned = stack.inside["name"] == "t5"
        carried_over = not learned or any(isinstance(e, CopyRows) for e in plan.edits if e.stack == stack.name)
        return (
            carried_over
            and stack.table is None
            and _same_inside(scheme, native_scheme(stack.inside, geometry), geometry)
        )
    if not stack.rotary:
        return False
    rotary_edits = RebuildRotary, NeutraliseRotary
    natives = [
        saved["child"] for edit, saved in swap.done() if isinstance(edit, rotary_edits) and edit.stack == stack.name
    ]
    if isinstance(scheme, Layered):
        schemes = {scheme.of_layer(layer) for layer in range(geometry.num_layers)}
    else:
        schemes = {scheme.new if isinstance(scheme, Blend) else scheme}
    return all(_same_angles(native, each, stack) for native in natives for each in schemes)


def _at_work(scheme: Scheme, model: Any, swap: AppliedSwap, stack: Stack, positions: Tensor) -> Scheme:
    """Return `scheme` without what does nothing at `positions`: a bias of zeros, a query scale of 1."""
    table, within = (scheme.table, scheme.inside) if isinstance(scheme, Together) else (None, scheme)
    if table is None and not isinstance(scheme, Sum):
        return scheme
    added = within.added if isinstance(within, Sum) else (within,)
    path = next(e.path for e in swap.plan.edits if isinstance(e, AddMechanism) and e.stack == stack.name)
    whole: Any = model.get_submodule(path)  # or PEFT's wrapper, which gives what its active copy has
    terms: list[Any] = list(whole.terms) if isinstance(original_of(whole), SumMechanism) else [whole]
    left = [term for term, made in zip(added, terms, strict=True) if not _does_nothing(made, positions, stack.geometry)]
    left = [term for term in (table, within.native if isinstance(within, Sum) else None) if term is not None] + left
    return left[0] if len(left) == 1 else scheme


def _does_nothing(mechanism: Mechanism, positions: Tensor, geometry: Geometry) -> bool:
    """Return whether `mechanism` changes no attention among tokens at `positions` [1, Q]."""
    if mechanism.turns:
        return False
    if mechanism.scales and bool((by_head(mechanism.scale(positions)) != 1).any()):
        return False
    if not mechanism.biases:
        return True
    bias = mechanism.bias(positions, positions)  # [1, H, Q, Q]
    hidden = positions[:, :, None] < positions[:, None, :] if geometry.causal else torch.zeros_like(bias[:, 0]).bool()
    return not bool(bias.masked_fill(hidden[:, None], 0.0).any())


def _same_angles(native: nn.Module, scheme: Scheme, stack: Stack) -> bool:
    """Return whether `native` rotates as `scheme` does within the original length."""
    if not isinstance(scheme, RotaryScheme):
        return False
    geometry = stack.geometry
    plain = scheme.native_rope(geometry) is not None and scheme.layout == (geometry.layout or scheme.layout)
    return plain and all(matches_within(native, scheme, geometry, name) for name in stack.full_attention_types)


def _same_inside(scheme: Scheme, native: Scheme, geometry: Geometry) -> bool:
    """Return whether `scheme` does within the original length what `native`, which was inside attention, does."""
    if scheme == native or not (isinstance(scheme, RotaryScheme) and isinstance(native, RotaryScheme)):
        return scheme == native
    new, old = scheme.angles(geometry), native.angles(geometry)
    alike = scheme.layout == native.layout and new.inv_freq.shape == old.inv_freq.shape
    plain = scheme.native_rope(geometry) is not None and new.attention_factor == old.attention_factor
    return alike and plain and torch.allclose(new.inv_freq, old.inv_freq, rtol=1e-5, atol=0)
