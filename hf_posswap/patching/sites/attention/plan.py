"""Plan the attention site: a scheme between projections and scores replaces the native mechanism, or why it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_posswap.compat.transformers_calls import forward_parameters, names_arguments
from hf_posswap.errors import SchemeError, UnsupportedSwapError
from hf_posswap.families.modules import join
from hf_posswap.families.rope_config import config_at
from hf_posswap.families.sites import Sites, Stack
from hf_posswap.geometry import Geometry
from hf_posswap.patching.edits.edit import Edit, PlanDraft, SwapContext
from hf_posswap.patching.sites.attention.edits import AddMechanism, PassCoordinates, PatchAttention, PatchImageAttention
from hf_posswap.patching.sites.attention.function import has_interface
from hf_posswap.patching.sites.attention.native import (
    AttendThroughInterface,
    CopyRows,
    RemoveRows,
    interface_edits,
    is_native,
    native_scheme,
    rows_of,
)
from hf_posswap.schemes.base import SCHEMES, Scheme
from hf_posswap.schemes.common.piece import pair_outside
from hf_posswap.schemes.common.trial import refuse_wrong_results
from hf_posswap.schemes.layered import Layered, PerLayer
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.schemes.rope import RotaryScheme
from hf_posswap.schemes.sum import Sum

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NATIVELY = "what its config expresses natively (rope, linear, ntk, yarn, llama3, ..., nope)"
ALTERING = ("attn_logit_softcapping", "softcap", "sinks")
"""Names of attributes by which attention modules change their scores other than by scaling."""


def plan_attention(context: SwapContext) -> PlanDraft:
    """Return what puts the scheme inside the attention of a stack, and takes away what is native there.

    Raises:
        UnsupportedSwapError: it cannot be put inside: why, and what would work.
    """
    draft, stack, scheme = PlanDraft(plugin=True), context.stack, context.scheme
    if scheme.kind == "none" and not scheme.acts_inside and context.site == "auto":
        if (stack.inside or {}).get("name") == "t5" and rows_of(context):
            return _remove_rows(context, native=True)  # a bias of zero is none, so rows of zeros do in a stock model
    if context.scheme.acts_inside or stack.inside is not None:
        draft += PlanDraft(edits=interface_edits(context, native_positions=stack.inside is None))
    if context.scheme.acts_inside:
        draft += _mechanism(context)
    keeps_rows = context.scheme.table_part is None and stack.inside is None
    return draft if keeps_rows else draft + _remove_rows(context, native=False)


_TEXT_ALONE = (
    "For text alone: the scheme rotates queries and keys by one position, and tokens of images and videos have three "
    "here (M-RoPE). A forward with them is refused."
)


def plan_longer_masks(context: SwapContext, planned: list[Edit]) -> PlanDraft:
    """Return attention classes with the interface where a model's own causal mask ends at the original length."""
    traits = context.stack.spec.traits
    exceeds_native = context.length > context.geometry.original_length or not context.scheme.table_part
    if traits is None or not traits.ends or not exceeds_native:
        return PlanDraft()
    if any(isinstance(edit, AttendThroughInterface) for edit in planned):
        return PlanDraft()
    return PlanDraft(edits=interface_edits(context, native_positions=True))


def _mechanism(context: SwapContext) -> PlanDraft:
    stack, scheme = context.stack, context.scheme
    mechanism, rows, layers = scheme.mechanism(context.geometry), rows_of(context), _layers(context)
    if stack.inputs == "text":
        refuse_wrong_results(scheme, context.geometry)
    _refuse_gaps(context, mechanism)
    refuse_inside(context.model, context.sites, stack, scheme, mechanism)
    refuse_without_effect(context.model, stack, scheme, [layer for layer, _ in layers])
    path = join(stack.entry if stack.name else context.sites.base, "posswap")
    add = AddMechanism(
        site="attention",
        path=path,
        before="-",
        after=scheme.name,
        stack=stack.name,
        entry=stack.entry,
        scheme=scheme,
        geometry=context.geometry,
        native_bias=stack.inside is not None and SCHEMES.get(stack.inside["name"]).kind == "bias",
        drops_bias=bool(rows),
        position_source=stack.source_for(scheme.name),
        padding_id=stack.padding_id,
    )
    edits: list[Edit] = [add, *_coordinates(context), *_patched(context, path, mechanism, layers)]
    learned = _native_table(context, path)
    if learned is not None and len(rows) == 1:
        edits.append(
            CopyRows(
                site="attention",
                path=f"{learned}.table",
                before="zeros",
                after=f"the rows of {rows[0]}",
                stack=stack.name,
                source=rows[0],
                carried=learned,
            )
        )
    added = {f"{path}.{name}": parameter.numel() for name, parameter in mechanism.named_parameters()}
    has_axes = any(hasattr(context.model.get_submodule(rotary), "mrope_section") for rotary in stack.rotary)
    takes_images = has_axes and "pixel_values" in forward_parameters(type(context.model))
    notes = [_TEXT_ALONE] if takes_images and mechanism.turns else []
    return PlanDraft(edits=edits, added=added, notes=notes)


def _native_table(context: SwapContext, path: str) -> str | None:
    """Return the path of the mechanism, at `path` or below, that is the native learned bias; None: there is none."""
    if context.stack.inside is None or context.stack.inside["name"] != "t5":
        return None
    if is_native(context):
        return path
    native = native_scheme(context.stack.inside, context.geometry)
    if isinstance(context.scheme, Sum) and native in context.scheme.terms:
        return f"{path}.terms.{context.scheme.added.index(native)}"
    return None


def _refuse_gaps(context: SwapContext, mechanism: Mechanism) -> None:
    """Raise SchemeError where a piece of the mechanism is missing: what a mask shows there would silently be hidden."""
    for inner in mechanism.modules():
        if not (isinstance(inner, Mechanism) and inner.splits):
            continue
        gap = pair_outside(inner, context.length)
        if gap is not None:
            query, key, count = gap
            raise SchemeError(
                f"{context.scheme.name}: the query at position {query} and the key at position {key} belong to {count} "
                "of its pieces, expected exactly 1. Every pair needs a piece, keys after their query too: a mask may "
                "show them (a prefix, the tokens of an image), so add a region for them (low=None, high=0)."
            )


def _layers(context: SwapContext) -> list[tuple[int, str]]:
    """Return index and path of the attention layers where the scheme acts: those whose rotation it replaces."""
    stack = context.stack
    layers = [(i, path) for i, path in enumerate(stack.attention) if i not in stack.nope_layers]
    if not stack.rotary or stack.rope_layer_types == ("",):
        return layers
    types, replaced = config_at(context.model.config, stack.config).layer_types, context.replaced_types
    return [(i, path) for i, path in layers if types[_index_in_types(context.model, path)] in replaced]


def _index_in_types(model: PreTrainedModel, path: str) -> int:
    """Return where `layer_types` of the config says of which type the attention module at `path` is."""
    index = getattr(model.get_submodule(path), "layer_idx", None)
    if not isinstance(index, int):
        raise UnsupportedSwapError(
            f"{path} ({type(model.get_submodule(path)).__name__}) has no layer_idx in this release of transformers, so "
            "of which type its layer is cannot be known. What works: a release that hf_posswap was tested with."
        )
    return index


def _coordinates(context: SwapContext) -> list[Edit]:
    stack = context.stack
    if stack.inputs == "text":
        return []
    return [
        PassCoordinates(
            site="attention",
            path=stack.entry or "(model)",
            before="-",
            after="passes the coordinates of patches on to attention",
            stack=stack.name,
            entry=stack.entry,
            geometry=context.geometry,
        )
    ]


def _patched(context: SwapContext, path: str, mechanism: Mechanism, layers: list[tuple[int, str]]) -> list[Edit]:
    stack, reads_text = context.stack, context.stack.inputs == "text"
    edit_class = PatchAttention if reads_text else PatchImageAttention
    return [
        edit_class(
            site="attention",
            path=module,
            before="raw q and k",
            after=effect_of(mechanism.for_layer(layer), cached=reads_text),
            stack=stack.name,
            carried=path,
            entry=stack.entry,
            first=stack.first_position,
            layer=layer,
        )
        for layer, module in layers
    ]


def _remove_rows(context: SwapContext, *, native: bool) -> PlanDraft:
    """Take the rows away from which the mechanism native inside attention was made."""
    draft = PlanDraft()
    for path in rows_of(context):
        weight = context.model.get_submodule(path).weight
        remove = RemoveRows(
            site="attention",
            path=path,
            before=f"{weight.shape[0]} rows",
            after="nothing added",
            stack=context.stack.name,
            native=native,
        )
        draft += PlanDraft(edits=[remove], unused={f"{path}.weight": weight.numel()})
    return draft


def effect_of(mechanism: Mechanism, *, cached: bool) -> str:
    """Return as text what `mechanism` does to the attention of a layer.

    Args:
        mechanism: of the layer.
        cached: whether keys may be cached.
    """
    effects = []
    if mechanism.splits:
        effects.append("split scores, each region with its own rotations")
    if mechanism.rotates:
        effects.append("keys rotated" if mechanism.splits else "q and k rotated")
    if (mechanism.rotates or mechanism.splits) and cached:
        rotated = mechanism.rotates and mechanism.stores_rotated_keys
        several = f"{mechanism.keys_per_token} rotated keys a token cached"
        several += ", one where it grows on a CPU" if mechanism.turns_on else ""
        single = "keys before the cache" if rotated else "raw keys cached"
        effects.append(several if mechanism.keys_per_token > 1 else single)
    if mechanism.scales:
        effects.append("queries scaled by their position")
    if mechanism.biases:
        effects.append("bias on the scores")
    return ", ".join(effects) or "no positions"


def refuse_inside(model: PreTrainedModel, sites: Sites, stack: Stack, scheme: Scheme, mechanism: Mechanism) -> None:
    """Refuse a `scheme`, at work as `mechanism`, that cannot be put inside the attention of `stack`.

    Raises:
        UnsupportedSwapError: why, and what would work.
    """
    _refuse_unproved(model, sites, stack, scheme, mechanism)
    _refuse_closed(model, stack)
    _refuse_entry(model, stack)
    _refuse_altered(model, stack, scheme, mechanism)
    seen, exact = stack.geometry.sliding_window, scheme.exact_below
    if stack.rotary and seen is not None and exact is not None and seen <= exact:
        layers = "every layer that rotates" if stack.nope_layers else "every layer"
        raise UnsupportedSwapError(
            f"{scheme.name} with exact distances below {exact} would change nothing: {type(model).__name__} sees only "
            f"the last {seen} keys in {layers}. What works: fewer exact ones, by a smaller window (shift in string)."
        )
    if stack.spec.layers_share and mechanism.for_layer(0) is not mechanism:
        raise UnsupportedSwapError(
            f"{scheme.name} gives layers different positions, and those of {type(model).__name__} share "
            "their attention modules. What works: one scheme for all layers."
        )
    if mechanism.turns and stack.rotary and stack.geometry.layout is None:
        raise UnsupportedSwapError(
            f"how {type(model).__name__} pairs its rotary dimensions is unknown, so {scheme.name} cannot "
            "be applied at the attention site. What works: alibi, nope, and what its config expresses natively."
        )


_READ = {"arange": (), "relative": ("attention_mask",), "mask": ("attention_mask",), "input_ids": ("input_ids",)}
"""Arguments of the module that takes the input from which positions are counted, by what the stock class counts."""


def _refuse_entry(model: PreTrainedModel, stack: Stack) -> None:
    """Refuse a stack whose input comes by arguments of other names than those that positions are counted from."""
    entry = model.get_submodule(stack.entry)
    names = list(forward_parameters(type(entry)))
    missing = [name for name in _READ[stack.position_source] if name not in names]
    if not names_arguments(type(entry)):
        missing = ["its arguments"]
    if missing:
        raise UnsupportedSwapError(
            f"the forward of {type(entry).__name__} does not name {', '.join(missing)}, so the positions of its tokens "
            f"cannot be known: it takes {', '.join(names)}. What works: a release of transformers that hf_posswap was "
            "tested with (posswap --version)."
        )


def _refuse_altered(model: PreTrainedModel, stack: Stack, scheme: Scheme, mechanism: Mechanism) -> None:
    if not any(module_part.splits for module_part in mechanism.modules() if isinstance(module_part, Mechanism)):
        return
    for path in stack.attention:
        module = model.get_submodule(path)
        altering = [name for name in ALTERING if getattr(module, name, None) is not None]
        if altering:
            raise UnsupportedSwapError(
                f"{scheme.name} has split scores, and {type(model).__name__} alters its own "
                f"({altering[0]}), which those do not. What works: rope, alibi, nope."
            )


def refuse_without_effect(model: PreTrainedModel, stack: Stack, scheme: Scheme, reached: list[int]) -> None:
    """Refuse a scheme by layer that names a layer which it does not reach, or that would change nothing.

    Args:
        model: on any device.
        stack: that the scheme is for.
        scheme: resolved.
        reached: the layers whose rotation it replaces.

    Raises:
        UnsupportedSwapError: names the layer, or says that it would change nothing.
    """
    if not isinstance(scheme, Layered) or len(reached) == len(stack.attention):
        return
    chosen = getattr(scheme, "layers", None) or ()
    named = {layer: scheme.of_layer(layer) for layer in (dict(chosen) if isinstance(scheme, PerLayer) else chosen)}
    works, whole = f"What works: layers {', '.join(map(str, reached))}", type(model).__name__
    ignored = [
        layer for layer, layer_scheme in named.items() if layer in stack.nope_layers and layer_scheme.acts_inside
    ]
    if ignored:
        raise UnsupportedSwapError(
            f"{scheme.name} names layer {ignored[0]}, which does not rotate in {whole}: a scheme replaces a rotation. "
            f"{works}."
        )
    if all(_is_as_before(scheme.of_layer(layer), stack.geometry) for layer in reached):
        raise UnsupportedSwapError(
            f"{scheme.name} would change nothing: in {whole} only the layers that "
            f"{'rotate' if stack.nope_layers else 'see all tokens'} ({', '.join(map(str, reached)) or 'none'}) take "
            "another rotation, and for those it says the one they have. What works: another scheme in one of them."
        )
    kept = [
        layer
        for layer, layer_scheme in named.items()
        if layer not in (*reached, *stack.nope_layers) and not _is_as_before(layer_scheme, stack.geometry)
    ]
    if kept:
        raise UnsupportedSwapError(
            f"{scheme.name} names layer {kept[0]}, which keeps its own rotation in {whole}: it sees only the last "
            f"tokens, and a scheme that rotates in any layer replaces only the rotation of layers that see all. {works}"
            ", and a default for the others; or schemes that rotate in no layer, which replace it in all."
        )


def _is_as_before(scheme: Scheme, geometry: Geometry) -> bool:
    """Return whether `scheme` turns q and k as the native rotary does."""
    if not isinstance(scheme, RotaryScheme) or not scheme.is_fixed or geometry.frequencies is None:
        return False
    angles = scheme.angles(geometry)
    native_inv_freq = torch.tensor(geometry.frequencies, dtype=torch.float32, device="cpu")
    same = scheme.layout == (geometry.layout or scheme.layout) and angles.inv_freq.shape == native_inv_freq.shape
    factor = abs(angles.attention_factor - geometry.attention_factor) < 1e-6
    return same and factor and torch.allclose(angles.inv_freq, native_inv_freq, rtol=1e-5, atol=0)


def _refuse_unproved(model: PreTrainedModel, sites: Sites, stack: Stack, scheme: Scheme, mechanism: Mechanism) -> None:
    proved, turned = sites.family.attention_proved, sites.family.turning_refused
    model_type = config_at(model.config, stack.config).model_type
    if model_type in turned:
        if mechanism.turns:
            raise UnsupportedSwapError(
                f"{scheme.name} would turn queries and keys inside attention, and for model type {model_type!r} that "
                f"is refused: {turned[model_type]}. What works: alibi, fire, kerple, t5, and {_NATIVELY}."
            )
        return
    if proved is not None and model_type not in proved:
        unknown = (
            "it is not proved that all layers and dimensions are treated alike, and its name is missing in "
            "ATTENTION_PROVED (page Extending, 'A new model type')"
        )
        raise UnsupportedSwapError(
            f"{scheme.name} would act inside attention, and for model type {model_type!r} that is refused: "
            f"{sites.family.attention_refused.get(model_type, unknown)}. What works: {_NATIVELY}."
        )


def _outside(stack: Stack) -> str:
    """Return what works where nothing can be put inside attention."""
    if stack.inputs == "images":
        return "What works: sinusoidal_2d, learned_2d, nope."
    if stack.rotary:
        return f"What works: {_NATIVELY}."
    return "What works: sinusoidal, learned." if stack.table else "No scheme of hf_posswap works here."


def _refuse_closed(model: PreTrainedModel, stack: Stack) -> None:
    traits = stack.spec.traits
    for path in stack.attention if traits is None or traits.interface is None else ():
        if not has_interface(model.get_submodule(path)):
            raise UnsupportedSwapError(
                f"{path} ({type(model.get_submodule(path)).__name__}) does not attend through transformers' "
                "AttentionInterface, so a scheme cannot be put inside. " + _outside(stack)
            )
