"""Which edits make the attention of a stack ready for a scheme, where its own class is not."""

from __future__ import annotations

from typing import Any

from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.base import Stack, matching
from hf_posswap.families.own import NativeScheme
from hf_posswap.geometry import Geometry
from hf_posswap.patching.actions import Action, SetAttribute
from hf_posswap.patching.interface import AttendThroughInterface, RemoveRows
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
    edits = [] if native_positions or stack.inside is None else _cleared(model, stack, base)
    before = "no interface" if stack.inside is None else native_scheme(stack.inside, stack.geometry).name
    for layer, path in enumerate(stack.attention if own.interface else ()):
        found = own.interface(model.get_submodule(path))  # type: ignore[misc]
        if isinstance(found, str):
            raise UnsupportedSwapError(
                f"{path}: {found}, so a scheme cannot be put inside. What works: the same model loaded with "
                "attn_implementation='eager'."
            )
        action = AttendThroughInterface(path, found, layer, native_positions)
        edits.append((path, before, f"{found.__name__}, through the AttentionInterface", action))
    return edits


def _cleared(model: Any, stack: Stack, base: str) -> list[EditText]:
    """Return the edits that keep the model from making the positions which are native inside attention."""
    own, edits = stack.spec.own, list[EditText]()
    assert own is not None
    if own.switch is not None:
        path, name = _join(base, own.switch[0]), own.switch[1]
        edits.append((_join(path, name), "True", "False", SetAttribute(path, name, True, False)))
    for path in rows_of(model, stack, base):
        rows = model.get_submodule(path).weight.shape[0]
        edits.append((path, f"{rows} rows", "nothing added", RemoveRows(path, native=False)))
    return edits


def rows_of(model: Any, stack: Stack, base: str) -> list[str]:
    """Return the paths of the embeddings from which the positions native inside attention are made."""
    own = stack.spec.own
    if own is None or not own.made_from:
        return []
    return [_join(base, path) for path in matching(model.get_submodule(base), own.made_from)]


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
