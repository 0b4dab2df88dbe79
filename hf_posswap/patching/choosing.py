"""Letting `set_attn_implementation` choose how a swapped model attends, where its stock class lets nobody choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_posswap.families.sites import Sites
from hf_posswap.patching.actions import Undo
from hf_posswap.patching.interface import AttendThroughInterface

_SET = ("_can_set_attn_implementation", "_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")


@dataclass
class ForgetChoice:
    """Takes away from a model what `LetChoose` gave it; its own config says how it attended."""

    def __call__(self, model: nn.Module) -> None:
        for module in _models(model):
            for name in _SET:
                vars(module).pop(name, None)


@dataclass(frozen=True)
class LetChoose:
    """Lets `set_attn_implementation` have a model attend by eager code or by sdpa, and refuse what it cannot have.

    transformers goes by the source of a class, and logs a warning where that has no interface; these attention modules
    have been given one. The masks of such classes are for eager code and sdpa at most.

    Attributes:
        sdpa: whether the masks that the model makes are for sdpa too.
    """

    sdpa: bool

    def apply(self, model: Any, undo: list[Undo]) -> None:
        undo.insert(0, ForgetChoice())
        for module in _models(model):
            for name, value in zip(_SET, (_yes, self.sdpa, False, False), strict=True):
                setattr(module, name, value)

    def dress(self, model: Any) -> None:
        """Give it to a model that was loaded natively, too."""
        self.apply(model, [])

    def problem(self, model: Any) -> str | None:
        """Return what is wrong where this was carried out, or None."""
        return None if model._can_set_attn_implementation() else "how it attends cannot be chosen any more"


def let_choose(model: Any, sites: Sites, edits: list[Any]) -> LetChoose | None:
    """Return the action after which one can choose how `model` attends; None: its class says, or other parts of it do.

    Args:
        model: the transformers model.
        sites: of it.
        edits: that are planned so far.
    """
    given = any(isinstance(edit.action, AttendThroughInterface) for edit in edits)
    if not given or len(sites.stacks) > 1 or getattr(model.config, "add_cross_attention", False):
        return None  # what attends across has the class that it had
    own = sites.main.spec.own
    return None if model._can_set_attn_implementation() or own is None else LetChoose(not own.eager_masks)


def _models(model: nn.Module) -> list[Any]:
    """Return `model` and the models in it that read the same config."""
    from transformers import PreTrainedModel

    config = model.config
    return [one for one in model.modules() if isinstance(one, PreTrainedModel) and one.config is config]


def _yes() -> bool:
    return True
