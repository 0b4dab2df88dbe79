"""Whether the scheme of a swapped model is, within the original length, the mechanism that it had before."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_posswap.families.sites import Stack
from hf_posswap.geometry import Geometry
from hf_posswap.patching.apply.applied import AppliedSwap
from hf_posswap.patching.edits.offload import stored
from hf_posswap.patching.sites.attention.interface import CopyRows
from hf_posswap.patching.sites.attention.native import native_scheme
from hf_posswap.patching.sites.embedding.table_edits import ReplaceTable
from hf_posswap.patching.sites.rotary.edits import NeutraliseRotary, RebuildRotary
from hf_posswap.patching.sites.rotary.matching import matches_within
from hf_posswap.schemes.base import Scheme
from hf_posswap.schemes.blend import Blend
from hf_posswap.schemes.layered import Layered
from hf_posswap.schemes.rope import RotaryScheme


def is_kept(model: Any, swap: AppliedSwap, stack: Stack) -> bool:
    """Return whether the scheme of `stack` is, within the original length, the mechanism that it had before."""
    plan, geometry = swap.plan, stack.geometry
    scheme = plan.schemes[stack.name]
    if plan.record.relative == "drop":
        return False
    if isinstance(scheme, Blend) and scheme.weight == 0:
        return True
    if scheme.keeps_native:
        return False  # what is added to it changes it
    first = next(edit for edit in plan.edits if edit.stack == stack.name)
    if isinstance(first, ReplaceTable) and not scheme.acts_inside:
        before = swap.saved_of(ReplaceTable, first.path)["weight"]
        now = stored(model.get_submodule(first.path), "weight")
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
