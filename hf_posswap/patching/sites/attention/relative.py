"""Relative positions inside attention that are not a scheme: they stay with a scheme, or are removed."""

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
        """Put the module back, on the device to which the model has moved."""
        if "module" not in saved:
            return
        owner, leaf = owner_of(model, self.path)
        neighbour = next(owner.parameters())
        if holds_values(neighbour):
            saved["module"].to(neighbour.device, neighbour.dtype)
        setattr(owner, leaf, saved["module"])

    def check(self, model: Any) -> str | None:
        owner, leaf = owner_of(model, self.path)
        actual = getattr(owner, leaf, None)
        return None if actual is None else f"a {type(actual).__name__} is there again"

    def reload(self, model: Any) -> None:
        """Nothing: the config says it."""

    @property
    def touches(self) -> tuple[str, ...]:
        return (f"{self.path}.",)


def relative_part(model: Any, stack: Stack) -> RelativePart | None:
    """Return the positions inside the attention of `stack` that are no scheme, or None."""
    relative = None if stack.spec.traits is None else stack.spec.traits.relative
    return relative if relative is not None and relative.is_in(config_at(model.config, stack.config)) else None


def relative_choice(model: Any, sites: Sites, choice: Any) -> Any:
    """Return "keep" or "drop" for the relative positions of `model`, or None where it has none.

    Raises:
        UnsupportedSwapError: `choice` is neither "keep" nor "drop", or the model has none.
    """
    if choice not in (None, "keep", "drop"):
        raise UnsupportedSwapError(f"relative must be 'keep' or 'drop', got {choice!r}.")
    if any(relative_part(model, stack) is not None for stack in sites.stacks):
        return choice or "keep"
    if choice is None:
        return None
    raise UnsupportedSwapError(
        f"relative={choice!r} is for models with relative positions inside attention and a position table (DeBERTa, "
        f"DeBERTa-v2); {type(model).__name__} has none. Leave it out."
    )


def plan_relative(context: SwapContext) -> PlanDraft:
    """Plan the relative positions inside attention: they stay, or their modules are removed."""
    relative = None if context.relative is None else relative_part(context.model, context.stack)
    if relative is None:
        return PlanDraft()
    if context.relative == "keep":
        return PlanDraft(notes=['Its relative positions stay with the scheme; relative="drop" removes them.'])
    edits = [*_switched_off(context, relative), *_left_out(context, relative)]
    return PlanDraft(
        edits=edits,
        values={relative.config_name: False},
        unused=_parameters_left_out(context.model, edits),
        adaptation="required: the weights have never been without their relative positions",
    )


def _switched_off(context: SwapContext, relative: RelativePart) -> Iterator[Edit]:
    name = relative.config_name
    for path in _paths(context, relative.switches):
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


def _left_out(context: SwapContext, relative: RelativePart) -> Iterator[Edit]:
    for path in _paths(context, relative.weights):
        before = type(context.model.get_submodule(path)).__name__
        yield LeaveOut(site="attention", path=path, before=before, after="left out", stack=context.stack.name)


def _paths(context: SwapContext, patterns: tuple[str, ...]) -> Iterator[str]:
    root = context.model.get_submodule(context.sites.base)
    return (join(context.sites.base, path) for pattern in patterns for path in matching(root, pattern))


def _parameters_left_out(model: Any, edits: list[Edit]) -> dict[str, int]:
    """Return the parameters, by name, of what `edits` leave out of `model`: their numbers of elements."""
    paths = [edit.path for edit in edits if isinstance(edit, LeaveOut)]
    parameters = ((path, *item) for path in paths for item in model.get_submodule(path).named_parameters())
    return {f"{path}.{name}": parameter.numel() for path, name, parameter in parameters}
