"""Whether a scheme can be put inside a model's attention, and why not."""

from __future__ import annotations

from typing import Any

import torch

from hf_posswap.compat.transformers_calls import forward_parameters, names_arguments
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.rope_config import config_at
from hf_posswap.families.sites import Sites, Stack
from hf_posswap.geometry import Geometry
from hf_posswap.patching.sites.attention.function import has_interface
from hf_posswap.schemes.base import Scheme
from hf_posswap.schemes.layered import Layered, PerLayer
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.schemes.rope import RotaryScheme

_NATIVELY = "what its config expresses natively (rope, linear, ntk, yarn, llama3, ..., nope)"
_ALTERING = ("attn_logit_softcapping", "softcap", "sinks")
"""Names of attributes by which attention modules change their scores other than by scaling."""


def refuse_inside(model: Any, sites: Sites, stack: Stack, scheme: Scheme, mechanism: Mechanism) -> None:
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
            f"{scheme.name} with window {exact} would change nothing: {type(model).__name__} sees only "
            f"the last {seen} keys in {layers}. What works: a smaller window."
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


def _refuse_entry(model: Any, stack: Stack) -> None:
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


def _refuse_altered(model: Any, stack: Stack, scheme: Scheme, mechanism: Mechanism) -> None:
    if not any(module_part.splits for module_part in mechanism.modules() if isinstance(module_part, Mechanism)):
        return
    for path in stack.attention:
        module = model.get_submodule(path)
        altering = [name for name in _ALTERING if getattr(module, name, None) is not None]
        if altering:
            raise UnsupportedSwapError(
                f"{scheme.name} has split scores, and {type(model).__name__} alters its own "
                f"({altering[0]}), which those do not. What works: rope, alibi, nope."
            )


def refuse_without_effect(model: Any, stack: Stack, scheme: Scheme, reached: list[int]) -> None:
    """Refuse a scheme by layer that names a layer without rotation, or that would change nothing.

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
    named = dict(scheme.layers) if isinstance(scheme, PerLayer) else {}
    ignored = [
        layer for layer, layer_scheme in named.items() if layer in stack.nope_layers and layer_scheme.acts_inside
    ]
    if ignored:
        raise UnsupportedSwapError(
            f"{scheme.name} names layer {ignored[0]}, which does not rotate in {type(model).__name__}: a scheme "
            f"replaces a rotation. What works: layers {', '.join(map(str, reached))}."
        )
    if all(_is_as_before(scheme.of_layer(layer), stack.geometry) for layer in reached):
        raise UnsupportedSwapError(
            f"{scheme.name} would change nothing: in {type(model).__name__} only the layers that "
            f"{'rotate' if stack.nope_layers else 'see all tokens'} ({', '.join(map(str, reached)) or 'none'}) take "
            "another rotation, and for those it says the one they have. What works: another scheme in one of them."
        )


def _is_as_before(scheme: Scheme, geometry: Geometry) -> bool:
    """Return whether `scheme` turns q and k as the native rotary does."""
    if not isinstance(scheme, RotaryScheme) or not scheme.only_rotates or geometry.frequencies is None:
        return False
    angles, native_inv_freq = scheme.angles(geometry), torch.tensor(geometry.frequencies)
    same = scheme.layout == (geometry.layout or scheme.layout) and angles.inv_freq.shape == native_inv_freq.shape
    factor = abs(angles.attention_factor - geometry.attention_factor) < 1e-6
    return same and factor and torch.allclose(angles.inv_freq, native_inv_freq, rtol=1e-5, atol=0)


def _refuse_unproved(model: Any, sites: Sites, stack: Stack, scheme: Scheme, mechanism: Mechanism) -> None:
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


def _refuse_closed(model: Any, stack: Stack) -> None:
    traits = stack.spec.traits
    for path in stack.attention if traits is None or traits.interface is None else ():
        if not has_interface(model.get_submodule(path)):
            raise UnsupportedSwapError(
                f"{path} ({type(model.get_submodule(path)).__name__}) does not attend through transformers' "
                "AttentionInterface, so a scheme cannot be put inside. " + _outside(stack)
            )
