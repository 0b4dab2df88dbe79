"""The training that the weights of a model need under a scheme."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hf_posswap.compat.torch_dispatch import PrivateRandomness
from hf_posswap.compat.torch_tensors import without_fake_mode
from hf_posswap.geometry import Geometry
from hf_posswap.patching.edits.edit import SwapContext
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.record import SwapRecord
from hf_posswap.patching.record.training import training_of
from hf_posswap.patching.sites.attention.native import is_native, native_scheme, rows_of
from hf_posswap.schemes.base import Scheme
from hf_posswap.schemes.blend import Blend
from hf_posswap.schemes.learned import Learned
from hf_posswap.schemes.rope import Rope, RotaryScheme
from hf_posswap.schemes.sum import Sum, Together

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_ANOTHER = "required: fine-tuning; until then expect a high loss: the weights were trained for another mechanism"
_ADDED = "fine-tuning: the mechanism that the weights know stays, or one they can use; what is added is new to them"
_OPTIONAL = "optional: usable untrained, better after a few hundred steps at the new length"
_UNSCALED = "fine-tuning, if the weights were trained with the scaling that this swap takes out of the config"
_FIRST, _SPREAD = 64, 192  # positions at which two biases are compared: the first ones, and more spread over the window


def adaptation_of(context: SwapContext) -> str:
    """Describe the training that the weights of a stack need under the scheme of `context`."""
    scheme, stack, length = context.scheme, context.stack, context.length
    geometry, native_kind = stack.geometry, "rotary" if stack.rotary else "table"
    if isinstance(scheme, Blend):
        return "as the weight moves: none at 0, where it is the old mechanism"
    if _keeps(context):
        return _ADDED
    if stack.inside is not None:
        native = native_scheme(stack.inside, geometry)
        native_kind, alone = native.kind, stack.table is None and len(rows_of(context)) < 2
        if alone and (adaptation := _of_native_bias(context, native)) is not None:
            return adaptation
    if scheme.kind != native_kind or scheme.kind == "bias":
        return _ANOTHER
    if isinstance(scheme, Learned) and scheme.extend != "reinit":
        if length == geometry.original_length:
            return "none: the table is kept"
        return "for use beyond the original window: the new rows have not been trained there"
    if scheme.kind == "table":
        return "required: fine-tuning, as every position vector changes"
    if isinstance(scheme, RotaryScheme) and not _turns_native_pairs(scheme, geometry):
        return "required: fine-tuning, as these pairs were not rotated like this in training"
    if type(scheme) is Rope and scheme.base == geometry.base and length <= geometry.original_length:
        return _UNSCALED if geometry.scaled_length else "none within the original window: the same mechanism"
    return _OPTIONAL


def _keeps(context: SwapContext) -> bool:
    """Return whether the scheme adds to the mechanism that the model has, or to one that it can use untrained."""
    scheme, stack = context.scheme, context.stack
    if isinstance(scheme, Together):
        learned = isinstance(scheme.table, Learned) and scheme.table.extend != "reinit"
        return learned and context.length == stack.geometry.original_length
    if isinstance(scheme, Sum) and stack.inside is not None:
        return stack.table is None and native_scheme(stack.inside, stack.geometry) in scheme.terms
    terms = scheme.terms if isinstance(scheme, Sum) and stack.rotary else ()
    rotations = (term for term in terms if isinstance(term, RotaryScheme))
    return scheme.keeps_native or any(_turns_native_pairs(term, stack.geometry) for term in rotations)


def _of_native_bias(context: SwapContext, native: Scheme) -> str | None:
    """Describe the training for the native scheme itself, or for a bias that replaces a bias; None: neither.

    Two biases need not be similar: if the new one does not start equal to the old one, the old one is lost.
    """
    scheme, geometry = context.scheme, context.stack.geometry
    if is_native(context):
        return "none: the same mechanism"
    if scheme.kind not in ("bias", "mixed") or native.kind != "bias":
        return None
    if _biases_alike(scheme, native, geometry):
        return "none within the original window: it starts as the mechanism that the weights were trained with"
    scaled = getattr(scheme, "interpolation", 1.0) != 1.0 and type(scheme) is type(native)
    if scaled and _biases_alike(replace(scheme, interpolation=1.0), native, geometry):  # type: ignore[call-arg]
        return _OPTIONAL
    return _ANOTHER


def _biases_alike(scheme: Scheme, native: Scheme, geometry: Geometry) -> bool:
    """Return whether the initial bias of `scheme` is the native one, up to a constant for each query.

    A learned native bias is in the weights of the model, and a scheme is not initialized from them.
    """
    length = geometry.original_length
    with without_fake_mode(), torch.device("cpu"), PrivateRandomness(0), torch.no_grad():
        new, old = scheme.mechanism(geometry), native.mechanism(geometry)
        if next(old.parameters(), None) is not None:
            return False
        at = torch.cat([torch.arange(min(_FIRST, length)), torch.linspace(0, length - 1, _SPREAD).round().long()])
        at = at.unique()[None]  # [1, P]
        seen = at[0][:, None] >= at if geometry.causal else torch.ones(at.shape[1], at.shape[1], dtype=torch.bool)
        for layer in range(geometry.num_layers):
            mechanism = new.for_layer(layer)
            if not mechanism.biases or mechanism.turns or mechanism.scales:
                return False
            difference = ((mechanism.bias(at, at) - old.for_layer(layer).bias(at, at)) * seen).double()
            mean = difference.sum(dim=-1, keepdim=True) / seen.sum(dim=-1, keepdim=True)
            if not bool(((difference - mean) * seen).abs().max() <= 1e-5 * length):
                return False
    return True


def as_trained(plan: SwapPlan, record: SwapRecord, config: PreTrainedConfig) -> SwapPlan:
    """Return `plan` with the training recorded in `config`, if that belongs to the recorded swap.

    Args:
        plan: of the recorded swap.
        record: of the swap.
        config: of the swapped model.
    """
    training = training_of(config)
    if training is None or not training.is_of(record):
        return plan
    return replace(plan, adaptation=f"adapted: {training}")


def _turns_native_pairs(scheme: RotaryScheme, geometry: Geometry) -> bool:
    """Return whether a rotary scheme rotates the same pairs as the native rotation, without needing training."""
    same = scheme.layout == (geometry.layout or scheme.layout)
    native = geometry.frequencies or ()
    if 0.0 in native and scheme.rotary_dim(geometry) == 2 * len(native):  # some pairs do not rotate
        angles = scheme.angles(geometry).inv_freq.tolist()
        same = same and all(bool(a) == bool(b) for a, b in zip(native, angles, strict=True))
    return same and scheme.rotary_dim(geometry) == geometry.rotary_dim and scheme.traits.training_free
