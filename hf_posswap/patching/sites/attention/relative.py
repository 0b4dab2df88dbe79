"""Positions inside attention that are no scheme of ours: they stay beside one, or go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hf_posswap.compat.torch_fake import holds_values
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.attention_traits import RelativePart
from hf_posswap.families.modules import join, matching, owner_of
from hf_posswap.families.rope_config import config_at
from hf_posswap.families.sites import Sites, Stack
from hf_posswap.patching.edits.context import PlanDraft, SwapContext
from hf_posswap.patching.edits.edit import Edit, Saved
from hf_posswap.patching.edits.settings import SetAttribute


@dataclass(frozen=True, kw_only=True)
class LeaveOut(Edit):
    """Leaves a module out of the model that nothing calls any more; its name keeps its place."""

    def apply(self, model: Any, saved: Saved) -> None:
        owner, leaf = owner_of(model, self.path)
        saved["module"] = model.get_submodule(self.path)
        setattr(owner, leaf, None)

    def undo(self, model: Any, saved: Saved) -> None:
        """Put the module back, its parameters where the model has moved meanwhile."""
        if "module" not in saved:
            return
        owner, leaf = owner_of(model, self.path)
        beside = next(owner.parameters())
        if holds_values(beside):
            saved["module"].to(beside.device, beside.dtype)
        setattr(owner, leaf, saved["module"])

    def check(self, model: Any) -> str | None:
        owner, leaf = owner_of(model, self.path)
        found = getattr(owner, leaf, None)
        return None if found is None else f"a {type(found).__name__} is there again"

    def reload(self, model: Any) -> None:
        """Nothing: the config says it."""

    @property
    def touches(self) -> tuple[str, ...]:
        return (f"{self.path}.",)


def relative_part(model: Any, stack: Stack) -> RelativePart | None:
    """Return the positions inside the attention of `stack` that are no scheme, or None."""
    part = None if stack.spec.traits is None else stack.spec.traits.relative
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


def plan_relative(context: SwapContext) -> PlanDraft:
    """Return what becomes of positions inside attention that are no scheme: they stay, or what makes them goes."""
    part = None if context.relative is None else relative_part(context.model, context.stack)
    if part is None:
        return PlanDraft()
    if context.relative == "keep":
        return PlanDraft(notes=['Its relative positions stay beside the scheme; relative="drop" takes them away.'])
    edits = [*_switched_off(context, part), *_left_out(context, part)]
    return PlanDraft(
        edits=edits,
        values={part.config_name: False},
        unused=_parameters_left_out(context.model, edits),
        adaptation="required: the weights have never been without their relative positions",
    )


def _switched_off(context: SwapContext, part: RelativePart) -> Iterator[Edit]:
    name = part.config_name
    for path in _paths(context, part.switches):
        yield SetAttribute(
            site="attention",
            path=f"{path}.{name}",
            before="True",
            after="False",
            stack=context.stack.name,
            module=path,
            name=name,
            value=False,
        )


def _left_out(context: SwapContext, part: RelativePart) -> Iterator[Edit]:
    for path in _paths(context, part.weights):
        before = type(context.model.get_submodule(path)).__name__
        yield LeaveOut(site="attention", path=path, before=before, after="left out", stack=context.stack.name)


def _paths(context: SwapContext, patterns: tuple[str, ...]) -> Iterator[str]:
    root = context.model.get_submodule(context.sites.base)
    return (join(context.sites.base, path) for pattern in patterns for path in matching(root, pattern))


def _parameters_left_out(model: Any, edits: list[Edit]) -> dict[str, int]:
    """Return the parameters, by name, of what `edits` leave out of `model`: their numbers of elements."""
    paths = [edit.path for edit in edits if isinstance(edit, LeaveOut)]
    found = ((path, *item) for path in paths for item in model.get_submodule(path).named_parameters())
    return {f"{path}.{name}": parameter.numel() for path, name, parameter in found}
