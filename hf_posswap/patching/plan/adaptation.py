"""What training the weights of a model need under a scheme."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_posswap.geometry import Geometry
from hf_posswap.patching.edits.context import SwapContext
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.record import SwapRecord
from hf_posswap.patching.record.training import training_of
from hf_posswap.patching.sites.attention.native import is_native, native_scheme, rows_of
from hf_posswap.schemes.blend import Blend
from hf_posswap.schemes.learned import Learned
from hf_posswap.schemes.rope import Rope, RotaryScheme


def adaptation_of(context: SwapContext) -> str:
    """Return what training the weights of a stack need under the scheme of `context`."""
    scheme, stack, length = context.scheme, context.stack, context.length
    geometry, native_kind = stack.geometry, "rotary" if stack.rotary else "table"
    if stack.inside is not None:
        native_kind = native_scheme(stack.inside, geometry).kind
        if is_native(context) and stack.table is None and len(rows_of(context)) < 2:
            return "none: the same mechanism"
    if isinstance(scheme, Blend):
        return "as the weight moves: none at 0, where it is the old mechanism"
    if scheme.kind != native_kind:
        return "required: fine-tuning; until then expect a high loss: the weights were trained for another mechanism"
    if isinstance(scheme, Learned) and scheme.extend != "reinit":
        if length == geometry.original_length:
            return "none: the table is kept"
        return "for use beyond the original window: the new rows have not been trained there"
    if scheme.kind == "table":
        return "required: fine-tuning, as every position vector changes"
    if isinstance(scheme, RotaryScheme) and not _turns_native_pairs(scheme, geometry):
        return "required: fine-tuning, as these pairs were not rotated like this in training"
    if type(scheme) is Rope and scheme.base == geometry.base and length <= geometry.original_length:
        return "none within the original window: the same mechanism"
    return "optional: usable untrained, better after a few hundred steps at the new length"


def as_trained(plan: SwapPlan, record: SwapRecord, config: Any) -> SwapPlan:
    """Return `plan`, which tells of the training that `config` records where that was of the recorded swap.

    Args:
        plan: of the swap that `record` says.
        record: of the swap.
        config: of the swapped model.
    """
    training = training_of(config)
    if training is None or not training.is_of(record):
        return plan
    return replace(plan, adaptation=f"adapted: {training}")


def _turns_native_pairs(scheme: RotaryScheme, geometry: Geometry) -> bool:
    """Return whether a rotary scheme turns the pairs that the model's own turned, in the manner of its kind."""
    same = scheme.layout == (geometry.layout or scheme.layout)
    own = geometry.frequencies or ()
    if 0.0 in own and scheme.rotary_dim(geometry) == 2 * len(own):  # some pairs of the model stand still
        angles = scheme.angles(geometry).inv_freq.tolist()
        same = same and all(bool(a) == bool(b) for a, b in zip(own, angles, strict=True))
    return same and scheme.rotary_dim(geometry) == geometry.rotary_dim and scheme.traits.training_free
