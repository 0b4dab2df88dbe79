"""Which edits make the attention of a stack ready for a scheme, where its own class is not."""

from __future__ import annotations

from typing import Any

import torch

from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.modules import matching
from hf_posswap.families.own import NativeScheme
from hf_posswap.families.sites import Stack
from hf_posswap.geometry import Geometry
from hf_posswap.patching.actions import Action, SetAttribute
from hf_posswap.patching.interface import AttendThroughInterface
from hf_posswap.patching.offloaded import stored
from hf_posswap.schemes.base import Scheme, make_scheme

EditText = tuple[str, str, str, Action]
"""Path, before, after and action of an edit."""


def native_scheme(inside: NativeScheme, geometry: Geometry) -> Scheme:
    """Return the position mechanism that is native inside attention as a resolved scheme."""
    return make_scheme(dict(inside)).resolve(geometry, None)


def ready_edits(model: Any, stack: Stack, base: str, *, native_positions: bool) -> list[EditText]:
    """Return the edits after which `stack` attends through the interface.

    Args:
        model: the transformers model.
        stack: one of its stacks.
        base: path of the base model.
        native_positions: whether positions that are native inside attention stay.

    Raises:
        UnsupportedSwapError: an attention module is of a class that no interface class is known to equal.
    """
    own = stack.spec.own
    if own is None:
        return []
    why = None if own.closed is None else own.closed(model.config)
    if why is not None:
        raise UnsupportedSwapError(f"nothing can be put inside the attention of {type(model).__name__}: {why}.")
    edits: list[EditText] = []
    for path in () if native_positions else rows_of(model, stack, base):
        _refuse_other_sinusoids(path, model.get_submodule(path))
    if own.switch is not None and not native_positions:
        path, name = _join(base, own.switch[0]), own.switch[1]
        edits.append((_join(path, name), "True", "False", SetAttribute(path, name, True, False)))
    before = "no interface" if stack.inside is None else native_scheme(stack.inside, stack.geometry).name
    for layer, path in enumerate(stack.attention if own.interface else ()):
        found = own.interface(model.get_submodule(path))  # type: ignore[misc]
        if isinstance(found, str):
            raise UnsupportedSwapError(
                f"{path}: {found}, so a scheme cannot be put inside. What works: the same model loaded with "
                "attn_implementation='eager'."
            )
        if found is type(model.get_submodule(path)):
            continue
        action = AttendThroughInterface(path, found, layer, native_positions)
        edits.append((path, before, f"{found.__name__}, through the AttentionInterface", action))
    return edits


def rows_of(model: Any, stack: Stack, base: str) -> list[str]:
    """Return the paths of the embeddings from which the positions native inside attention are made."""
    own = stack.spec.own
    if own is None or not own.made_from:
        return []
    return [_join(base, path) for path in matching(model.get_submodule(base), own.made_from)]


def _refuse_other_sinusoids(path: str, embedding: Any) -> None:
    """Refuse a frozen table of sinusoids that does not hold what its class computes: the native angles are unknown."""
    if not hasattr(embedding, "create_weight") or stored(embedding, "weight").is_meta:
        return
    if not torch.allclose(stored(embedding, "weight").float().cpu(), embedding.create_weight().float(), atol=1e-2):
        raise UnsupportedSwapError(
            f"{path} holds other numbers than the sinusoids that {type(embedding).__name__} computes, so the angles by "
            "which this model turns are unknown. What works: a checkpoint whose table was never changed."
        )


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
