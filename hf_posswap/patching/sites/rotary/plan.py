"""Planning the rotary site: frequencies from a stock config, or the identity rotation."""

from __future__ import annotations

from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.rope_config import config_at
from hf_posswap.families.rotary_compatibility import POSITIONS_ELSEWHERE
from hf_posswap.patching.edits.context import PlanDraft, SwapContext
from hf_posswap.patching.edits.settings import setting_edits
from hf_posswap.patching.sites.rotary.edits import KeepRotary, NeutraliseRotary, RebuildRotary
from hf_posswap.patching.sites.rotary.native_config import refused_values
from hf_posswap.patching.sites.rotary.native_swap import NativeSwap, kept_layers, native_swap
from hf_posswap.schemes.blend import Blend


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
    values, notes = refused_values(context.model, stack, types), [*kept_layers(stack, types)]
    if context.length > context.geometry.original_length:
        notes.append(
            f"The rotation stays as it is: beyond {context.geometry.original_length} positions it turns by angles that "
            "the weights have not seen. To scale it, give a scheme in place of native, such as yarn."
        )
    return PlanDraft(edits=[*edits], values=values, notes=notes, plugin=True)


def _before(context: SwapContext) -> str:
    g = context.geometry
    return f"rope, theta {g.base:g}, {g.rotary_dim} of {g.head_dim} dims"
