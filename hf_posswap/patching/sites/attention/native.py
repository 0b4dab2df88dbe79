"""Positions that are native inside attention, and the edits that make it ready for others where its class is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_posswap.compat.torch_fake import holds_values
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.attention_traits import NativeScheme
from hf_posswap.families.modules import get, join, matching
from hf_posswap.geometry import Geometry
from hf_posswap.patching.edits.context import SwapContext
from hf_posswap.patching.edits.edit import Edit
from hf_posswap.patching.edits.offload import stored
from hf_posswap.patching.edits.settings import SetAttribute
from hf_posswap.patching.sites.attention.interface import AttendThroughInterface, StopRotation
from hf_posswap.schemes.base import Scheme, make_scheme


def native_scheme(inside: NativeScheme, geometry: Geometry) -> Scheme:
    """Return the position mechanism that is native inside attention as a resolved scheme."""
    return make_scheme(dict(inside)).resolve(geometry, None)


def interface_edits(context: SwapContext, *, native_positions: bool) -> list[Edit]:
    """Return the edits after which a stack attends through the interface.

    Args:
        context: of the stack.
        native_positions: whether positions that are native inside attention stay.

    Raises:
        UnsupportedSwapError: an attention module is of a class that no interface class is known to equal, or this
            release of transformers lacks what that class is made from.
    """
    model, stack, traits = context.model, context.stack, context.stack.spec.traits
    if traits is None:
        return []
    why = None if traits.closed is None else traits.closed(model.config)
    if why is not None:
        raise UnsupportedSwapError(f"nothing can be put inside the attention of {context.model_name}: {why}.")
    edits: list[Edit] = []
    for path in () if native_positions else rows_of(context):
        _refuse_other_sinusoids(path, model.get_submodule(path))
    if traits.switch is not None and not native_positions:
        edits.append(_switch_off(context, *traits.switch))
    if traits.angles and not native_positions:
        edits += _stop_rotation(context, traits.angles)
    for layer, path in enumerate(stack.attention if traits.interface else ()):
        interface_class = _interface_of(traits.interface, path, model.get_submodule(path))  # type: ignore[arg-type]
        if isinstance(interface_class, str):
            raise UnsupportedSwapError(f"{path}: {interface_class}")
        if interface_class is not type(model.get_submodule(path)):
            edits.append(_through_interface(context, path, interface_class, layer, native_positions=native_positions))
    return edits


def _interface_of(find: Callable[[nn.Module], type | str], path: str, module: nn.Module) -> type | str:
    try:
        return find(module)
    except (ImportError, AttributeError) as error:  # classes and functions of transformers that were moved or renamed
        raise UnsupportedSwapError(
            f"{path}: this release of transformers lacks what its attention with the interface is made from ({error}), "
            "so a scheme cannot be put inside. Install a release that hf_posswap was tested with."
        ) from error


def _switch_off(context: SwapContext, below: str, name: str) -> Edit:
    path = join(context.sites.base, below)
    return SetAttribute(
        site="attention",
        path=join(path, name),
        before="True",
        after="False",
        stack=context.stack.name,
        module=path,
        name=name,
        value=False,
    )


def _stop_rotation(context: SwapContext, below: str) -> list[Edit]:
    path = join(context.sites.base, below)
    if get(context.model, path) is None:  # a release in which each attention module has its own angles
        return []
    before = native_scheme(context.stack.inside, context.geometry).name if context.stack.inside else "rotation"
    return [StopRotation(site="attention", path=path, before=before, after="identity", stack=context.stack.name)]


def _through_interface(context: SwapContext, path: str, cls: type, layer: int, *, native_positions: bool) -> Edit:
    stack = context.stack
    return AttendThroughInterface(
        site="attention",
        path=path,
        before="no interface" if stack.inside is None else native_scheme(stack.inside, stack.geometry).name,
        after=f"{cls.__name__}, through the AttentionInterface",
        stack=stack.name,
        module=cls.__module__,
        name=cls.__name__,
        layer=layer,
        native_positions=native_positions,
    )


def rows_of(context: SwapContext) -> list[str]:
    """Return the paths of the embeddings from which the positions native inside attention are made."""
    traits, base = context.stack.spec.traits, context.sites.base
    if traits is None or not traits.made_from:
        return []
    return [join(base, path) for path in matching(context.model.get_submodule(base), traits.made_from)]


def is_native(context: SwapContext) -> bool:
    """Return whether the scheme is the one that is native inside attention."""
    inside = context.stack.inside
    return inside is not None and context.scheme == native_scheme(inside, context.geometry)


def _refuse_other_sinusoids(path: str, embedding: Any) -> None:
    """Refuse a frozen table of sinusoids that does not hold what its class computes: the native angles are unknown."""
    if not hasattr(embedding, "create_weight") or not holds_values(stored(embedding, "weight")):
        return
    if not torch.allclose(stored(embedding, "weight").float().cpu(), embedding.create_weight().float(), atol=1e-2):
        raise UnsupportedSwapError(
            f"{path} holds other numbers than the sinusoids that {type(embedding).__name__} computes, so the angles by "
            "which this model turns are unknown. What works: a checkpoint whose table was never changed."
        )
