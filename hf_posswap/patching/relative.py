"""Positions inside attention that are no scheme of ours: they stay beside one, or go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.modules import join, matching
from hf_posswap.families.own import RelativePart
from hf_posswap.families.rope_config import config_at
from hf_posswap.families.sites import Sites, Stack
from hf_posswap.patching.actions import Action, SetAttribute, Undo


@dataclass
class PutBack:
    """Puts a module back that was left out, its parameters where the model has moved meanwhile."""

    path: str
    module: nn.Module

    def __call__(self, model: nn.Module) -> None:
        owner_path, _, leaf = self.path.rpartition(".")
        owner = model.get_submodule(owner_path)
        beside = next(owner.parameters())
        if not beside.is_meta:
            self.module.to(beside.device, beside.dtype)
        owner._modules[leaf] = self.module


@dataclass(frozen=True)
class LeaveOut:
    """Leaves a module out of the model that nothing calls any more; its name keeps its place."""

    path: str

    def apply(self, model: Any, undo: list[Undo]) -> None:
        owner, _, leaf = self.path.rpartition(".")
        undo.insert(0, PutBack(self.path, model.get_submodule(self.path)))
        model.get_submodule(owner)._modules[leaf] = None

    def problem(self, model: Any) -> str | None:
        """Return what is wrong where this was carried out, or None."""
        owner, _, leaf = self.path.rpartition(".")
        held = model.get_submodule(owner)._modules.get(leaf)
        return None if held is None else f"a {type(held).__name__} is there again"


def relative_part(model: Any, stack: Stack) -> RelativePart | None:
    """Return the positions inside the attention of `stack` that are no scheme, or None."""
    part = None if stack.spec.own is None else stack.spec.own.relative
    return part if part is not None and part.is_in(config_at(model.config, stack.config)) else None


def relative_choice(model: Any, sites: Sites, asked: Any) -> Any:
    """Return what becomes of the relative positions of `model`: as `asked`, or None where it has none.

    Raises:
        UnsupportedSwapError: neither "keep" nor "drop" was asked, or it was and the model has none.
    """
    if asked not in (None, "keep", "drop"):
        raise UnsupportedSwapError(f"relative must be 'keep' or 'drop', got {asked!r}.")
    if any(relative_part(model, stack) is not None for stack in sites.stacks):
        return asked or "keep"
    if asked is None:
        return None
    raise UnsupportedSwapError(
        f"relative={asked!r} is for models with relative positions inside attention beside a position table (DeBERTa, "
        f"DeBERTa-v2); {type(model).__name__} has none. Leave it out."
    )


def relative_edits(model: Any, part: RelativePart, base: str) -> Iterator[tuple[str, str, str, Action]]:
    """Yield the edits that take `part` out of force: path, before, after and action of each.

    Args:
        model: the transformers model.
        part: of it.
        base: path of the base model.
    """
    root, name = model.get_submodule(base), part.config_name
    for path in (join(base, path) for pattern in part.switches for path in matching(root, pattern)):
        yield f"{path}.{name}", "True", "False", SetAttribute(path, name, True, False)
    for path in (join(base, path) for pattern in part.weights for path in matching(root, pattern)):
        yield path, type(model.get_submodule(path)).__name__, "left out", LeaveOut(path)


def parameters_left_out(model: Any, edits: list[Any]) -> dict[str, int]:
    """Return the parameters, by name, of what `edits` leave out of `model`: their numbers of elements."""
    paths = [edit.path for edit in edits if isinstance(edit.action, LeaveOut)]
    held = ((path, *item) for path in paths for item in model.get_submodule(path).named_parameters())
    return {f"{path}.{name}": parameter.numel() for path, name, parameter in held}
