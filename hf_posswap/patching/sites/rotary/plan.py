"""Planning the rotary site: frequencies from a stock config, or the identity rotation.

Whether a stock config can express a scheme is determined by building modules from that config.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_posswap.compat.transformers_attention import runs_longrope_by_layer_type, turns_part
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.modules import modeling_module
from hf_posswap.families.rope_config import config_at
from hf_posswap.families.rotary import POSITIONS_ELSEWHERE
from hf_posswap.families.sites import Stack
from hf_posswap.patching.edits.edit import PlanDraft, SwapContext
from hf_posswap.patching.edits.settings import Scalar, setting_edits, settings_to_follow
from hf_posswap.patching.record.model_class import native_skeleton
from hf_posswap.patching.sites.rotary.edits import KeepRotary, NeutraliseRotary, RebuildRotary
from hf_posswap.patching.sites.rotary.modules import (
    RopeValues,
    base_of,
    follows_config,
    keeps,
    matches,
    read_back,
    refused_values,
    running,
    same_widths,
    says,
    trial_config,
    turns_nothing,
    with_real_dtype,
)
from hf_posswap.schemes.base import Scheme
from hf_posswap.schemes.blend import Blend
from hf_posswap.schemes.rope import RotaryScheme

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def plan_rotary(context: SwapContext) -> PlanDraft:
    """Return the edits of the native rotary modules of a stack; with `plugin`, the scheme must act inside attention.

    Raises:
        UnsupportedSwapError: a rotary module does not match the model's config, or other positions would remain.
    """
    stack = context.stack
    if not stack.rotary or stack.inside is not None:
        return PlanDraft()
    if not context.scheme.acts_inside:
        _refuse_positions_elsewhere(context)
    if context.scheme.keeps_native:
        return _keep(context)
    if isinstance(context.scheme, Blend) or context.site == "attention":
        return _neutralise(context)
    native = native_swap(context.model, stack, context.scheme, context.length)
    return _neutralise(context) if native is None else _rebuild(context, native)


def _refuse_positions_elsewhere(context: SwapContext) -> None:
    """Refuse a scheme that removes the rotation of a model which also uses positions elsewhere.

    Raises:
        UnsupportedSwapError: the model does.
    """
    why = POSITIONS_ELSEWHERE.get(config_at(context.model.config, context.stack.config).model_type)
    if why is not None:
        raise UnsupportedSwapError(
            f"{context.scheme.name} would leave positions in {type(context.model).__name__}: {why}. What works: rope "
            "and its scalings."
        )


def _rebuild(context: SwapContext, native: NativeSwap) -> PlanDraft:
    stack, config = context.stack, config_at(native.trial, context.stack.config)
    edits = [
        RebuildRotary(
            site="rotary",
            path=path,
            before=_before(context),
            after=context.scheme.name,
            stack=stack.name,
            part=stack.config,
            values={name: getattr(config, name) for name in ("max_position_embeddings", "rope_parameters")},
            scheme=context.scheme,
            geometry=context.geometry,
            layer_types=stack.full_attention_types,
        )
        for path in stack.rotary
    ]
    settings = setting_edits(native.settings, "rotary", stack.name)
    return PlanDraft(edits=[*edits, *settings], values=dict(native.values), notes=list(native.notes))


def _neutralise(context: SwapContext) -> PlanDraft:
    """Replace the rotation by the identity, and mark the config so that stock transformers refuses it."""
    stack, types = context.stack, context.replaced_types
    where = f" in layers of type {', '.join(types)}" if types != stack.rope_layer_types else ""
    edits = [
        NeutraliseRotary(
            site="rotary",
            path=path,
            before=_before(context),
            after=f"identity rotation{where}",
            stack=stack.name,
            part=stack.config,
            layer_types=types,
        )
        for path in stack.rotary
    ]
    values = refused_values(context.model, stack, types)
    return PlanDraft(edits=[*edits], values=values, notes=list(kept_layers(stack, types)), plugin=True)


def _keep(context: SwapContext) -> PlanDraft:
    """Keep the rotation next to what the scheme adds, and mark the config so that stock transformers refuses it."""
    stack = context.stack
    edits = [
        KeepRotary(
            site="rotary",
            path=path,
            before=_before(context),
            after="the same",
            stack=stack.name,
            part=stack.config,
            follows_length=context.geometry.frequencies is None,
        )
        for path in stack.rotary
    ]
    types = stack.rope_layer_types
    values, notes = refused_values(context.model, stack, types), [*kept_layers(stack, types, replaced=False)]
    if context.length > context.geometry.original_length:
        notes.append(
            f"The rotation stays as it is: beyond {context.geometry.original_length} positions it turns by angles that "
            "the weights have not seen. To scale it, give a scheme in place of native, such as yarn."
        )
    return PlanDraft(edits=[*edits], values=values, notes=notes, plugin=True)


def _before(context: SwapContext) -> str:
    g = context.geometry
    return f"rope, theta {g.base:g}, {g.rotary_dim} of {g.head_dim} dims"


@dataclass(frozen=True)
class NativeSwap:
    """A scheme as expressed by a stock config.

    Attributes:
        trial: the whole config of the swapped model.
        settings: attributes outside the rotary modules that change with that config: path, name, old, new.
        values: changed config values, by path.
        notes: for the plan.
    """

    trial: Any
    settings: list[tuple[str, str, Scalar, Scalar]]
    values: dict[str, Any]
    notes: tuple[str, ...]


def native_swap(model: PreTrainedModel, stack: Stack, scheme: Scheme, length: int) -> NativeSwap | None:
    """Return how a stock config expresses `scheme` in a stack of a rotary model; None if none does.

    Raises:
        UnsupportedSwapError: a rotary module of the model does not match the model's config.
    """
    for values in _candidates(model, stack, scheme):
        if not runs_longrope_by_layer_type() and any(
            kind and r["rope_type"] == "longrope" for kind, r in values.items()
        ):
            continue  # this release of transformers stops at the second text beyond the original length
        follows = any(rope["rope_type"] == "dynamic" for rope in values.values())  # it takes L from there
        reach = stack.geometry.original_length if follows else length  # as `max_position_embeddings`
        trial = trial_config(model.config, stack.config, values, reach)
        config = config_at(trial, stack.config)
        read = read_back(trial)
        if read is None or not says(config_at(read, stack.config), values):
            continue  # it could be set, but not loaded again
        if not says(config, values) or not _all_follow(model, stack, scheme, config):
            continue
        settings = _settings(model, stack, trial)
        if settings is None or any(_is_width(model.get_submodule(change[0]), *change[1:]) for change in settings):
            continue
        prefix = f"{stack.config}." if stack.config else ""
        changed = {f"{prefix}max_position_embeddings": reach, f"{prefix}rope_parameters": config.rope_parameters}
        current = config_at(model.config, stack.config)
        same = stack.geometry.scaled_length is not None and _all_follow(model, stack, scheme, current)
        return NativeSwap(trial, settings, changed, kept_layers(stack, tuple(values), replaced=not same))
    return None


def _settings(model: PreTrainedModel, stack: Stack, trial: Any) -> list[tuple[str, str, Scalar, Scalar]] | None:
    """Return the settings that change with the config `trial`; None if its model cannot be built."""
    try:
        current = copy.deepcopy(model.config)
        current = with_real_dtype(current, config_at(current, stack.config))
        before, after = native_skeleton(model, current), native_skeleton(model, trial)
    except Exception:  # arbitrary model code, written for other rope parameters
        return None
    return settings_to_follow(model, before, after, stack.rotary)


def _is_width(module: nn.Module, name: str, old: object, new: object) -> bool:
    """Return whether a setting is a rotary width that is read: attention would then split its heads differently.

    Any method except the constructor may read it.
    """
    whole = isinstance(new, int) and not isinstance(new, bool) and isinstance(old, int)
    if not whole or not any(fragment in name for fragment in ("rot", "dim", "head_size")):
        return False
    methods = [value for owner in type(module).__mro__ if owner is not nn.Module for value in vars(owner).values()]
    methods = [inspect.unwrap(method) for method in methods if callable(method)]
    codes = [getattr(method, "__code__", None) for method in methods if getattr(method, "__name__", "") != "__init__"]
    return any(code is not None and name in code.co_names for code in codes)


def _candidates(model: PreTrainedModel, stack: Stack, scheme: Scheme) -> list[RopeValues]:
    """Return candidate rope parameters for the scheme, the most natural first."""
    if not scheme.acts_inside:
        config = config_at(model.config, stack.config)
        still: dict[str, object] = {"rope_type": "proportional", "partial_rotary_factor": 0.0}
        plain = {name: still | {"rope_theta": base_of(config, name)} for name in stack.rope_layer_types}
        scaled = {
            name: values | {"factor": 1.0} for name, values in plain.items()
        }  # some models read a factor for every type
        return [plain, scaled]
    if not isinstance(scheme, RotaryScheme) or scheme.layout != (stack.geometry.layout or scheme.layout):
        return []
    values = scheme.native_rope(stack.geometry)
    if values is None:
        return []
    partial: dict[str, object] = {"partial_rotary_factor": scheme.filled("partial")}
    wide = values | partial  # some models read it, some have it elsewhere
    listed = scheme.native_list(stack.geometry) if scheme.is_fixed else None  # the only form in Phi-3's config
    if listed is not None and scheme.filled("partial") < 1:
        listed |= partial  # without it, transformers logs that it expects a number for each pair of a whole head
    return [dict.fromkeys(stack.full_attention_types, rope) for rope in (values, wide, listed) if rope is not None]


def _all_follow(model: PreTrainedModel, stack: Stack, scheme: Scheme, config: PreTrainedConfig) -> bool:
    """Return whether every rotary module of the stack, built from the sub-config `config`, matches the scheme."""
    current = config_at(model.config, stack.config)
    for path in stack.rotary:
        old: nn.Module = model.get_submodule(path)
        if not follows_config(old, current):
            raise UnsupportedSwapError(
                f"{path} does not follow the model's config (a new one built from it has other frequencies), "
                "so it cannot be rebuilt from another config."
            )
        new = running(old, current, config)
        if new is None:
            return False
        if not scheme.acts_inside:
            if not turns_nothing(new) or not same_widths(new, old):
                return False
            continue
        assert isinstance(scheme, RotaryScheme)
        turned = all(matches(new, scheme, stack.geometry, name) for name in stack.full_attention_types)
        if turned and not same_widths(new, old):
            code = modeling_module(model.get_submodule(stack.attention[0]))
            turned = turns_part(code, stack.geometry.head_dim, scheme.rotary_dim(stack.geometry))
        if not turned or not keeps(new, old, current, stack.full_attention_types):
            return False
    return True


def kept_layers(stack: Stack, layer_types: tuple[str, ...], *, replaced: bool = True) -> tuple[str, ...]:
    """Return notes on layers that keep their own, as they do not rotate or are not in `layer_types`, and on scaling."""
    notes, others = [], [name for name in stack.rope_layer_types if name not in layer_types]
    if replaced and stack.geometry.scaled_length:
        notes.append(
            f"The config scales its rotation from {stack.geometry.original_length} to {stack.geometry.scaled_length} "
            "positions. This swap replaces that scaling, and lengths count from the first: weights that were trained "
            "with it, as Llama 3.1's, Phi-3's and gpt-oss', lose it. Where it was only added, as to Qwen2.5, nothing "
            "is lost."
        )
    if others:
        notes.append(
            f"Layers of type {', '.join(others)} keep their own rotation: they see only the last tokens, and a longer "
            f"context depends on {', '.join(layer_types)}."
        )
    if stack.nope_layers:
        notes.append(f"Layers without rotation stay as they are: {', '.join(map(str, stack.nope_layers))}.")
    return tuple(notes)
