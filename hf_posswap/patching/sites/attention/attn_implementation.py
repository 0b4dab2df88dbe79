"""Letting `set_attn_implementation` choose how a swapped model attends, where its stock class lets nobody choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_posswap.compat.transformers_attention import (
    can_choose_attention,
    let_choose_attention,
    let_class_choose_attention,
)
from hf_posswap.patching.edits.context import PlanDraft, SwapContext
from hf_posswap.patching.edits.edit import Edit, Saved
from hf_posswap.patching.sites.attention.interface import AttendThroughInterface


@dataclass(frozen=True, kw_only=True)
class AllowAttnImplementation(Edit):
    """Lets `set_attn_implementation` switch a model between eager and sdpa, and refuse other implementations.

    transformers goes by the source of a class, and logs a warning where that has no interface; these attention modules
    have been given one. The masks of such classes are for eager code and sdpa at most.

    Attributes:
        sdpa: whether the masks that the model makes are for sdpa too.
    """

    sdpa: bool

    def apply(self, model: Any, saved: Saved) -> None:
        for module in _models(model):
            let_choose_attention(module, sdpa=self.sdpa)

    def undo(self, model: Any, saved: Saved) -> None:
        """Take the choice away; the model's own config says how it attended."""
        for module in _models(model):
            let_class_choose_attention(module)

    def check(self, model: Any) -> str | None:
        return None if can_choose_attention(model) else "its attn_implementation cannot be set any more"

    def reload(self, model: Any) -> None:
        self.apply(model, {})

    @property
    def touches(self) -> tuple[str, ...]:
        return ()


def plan_attn_implementation(context: SwapContext, edits: list[Edit]) -> PlanDraft:
    """Return the edit after which the attn_implementation of a model can be set; none where its class already can.

    Args:
        context: of the model's main stack.
        edits: that are planned so far.
    """
    model, sites = context.model, context.sites
    given = any(isinstance(edit, AttendThroughInterface) for edit in edits)
    if not given or len(sites.stacks) > 1 or getattr(model.config, "add_cross_attention", False):
        return PlanDraft()  # what attends across has the class that it had
    traits = sites.main.spec.traits
    if can_choose_attention(model) or traits is None:
        return PlanDraft()
    implementations = "only eager" if traits.eager_masks else "eager or sdpa"
    allow = AllowAttnImplementation(
        site="attention",
        path="(model)",
        before="attends as its class does",
        after=f"attn_implementation can be set: {implementations}",
        stack=context.stack.name,
        sdpa=not traits.eager_masks,
    )
    note = (
        f"set_attn_implementation: {implementations}. The stock class ignores it, with a warning; flash and flex are "
        "refused."
    )
    return PlanDraft(edits=[allow], notes=[note])


def _models(model: nn.Module) -> list[Any]:
    """Return `model` and the models in it that read the same config."""
    from transformers import PreTrainedModel

    config: Any = model.config
    return [module for module in model.modules() if isinstance(module, PreTrainedModel) and module.config is config]
