"""An applied swap: the state that a swapped model keeps in `model._posswap`, and its check without a forward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.utils.hooks import RemovableHandle

from hf_posswap.compat.torch_tensors import version_of
from hf_posswap.errors import SwapVerificationError
from hf_posswap.families.modules import is_removed
from hf_posswap.patching.edits.edit import Edit, Saved
from hf_posswap.patching.edits.restore import OffloadAgain
from hf_posswap.patching.plan.swap_plan import SwapPlan

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

_ATTRIBUTE = "_posswap"
Fingerprint = dict[str, tuple[int, int | None]]


@dataclass
class AppliedSwap:
    """An applied plan.

    Attributes:
        plan: the current plan of the swap.
        config: the model's config before the swap; the swapped model uses a copy.
        saved: what each edit removed from the model, in the order of the plan's edits; None for a model that was loaded
            swapped, because the original is unknown.
        offloaded: callables that move weights back to where accelerate had them.
        fitted: whether weights of the model were fitted to the swap (`fit_rotation`), so that undoing the swap would
            not restore the original.
        guard: handle of the hook that refuses to save an enclosing model without the record.
        sequence_lengths: `max_seq_length` of the SentenceTransformer around the model, before the swap and as the swap
            set it, and the modules whose `config_keys` the swap made hold it, by path; None: the model was swapped by
            itself, or the swap left the length as it was.
        swapped_config: a copy of the config as the swap left it, by which later changes are seen; None: the swap was
            not completed.
    """

    plan: SwapPlan
    config: PreTrainedConfig
    saved: list[Saved] | None = None
    offloaded: list[OffloadAgain] = field(default_factory=list)
    fitted: bool = False
    guard: RemovableHandle | None = None
    sequence_lengths: tuple[int | None, int, list[str]] | None = None
    swapped_config: PreTrainedConfig | None = None

    @property
    def can_undo(self) -> bool:
        """Whether the original mechanism can be restored."""
        return self.saved is not None

    def done(self) -> list[tuple[Edit, Saved]]:
        """Return the edits that were applied, at least in part, each with its saved state."""
        return list(zip(self.plan.edits, self.saved or (), strict=False))

    def saved_of(self, edit_type: type[Edit], path: str) -> Saved:
        """Return the saved state of the edit of this type at `path`; empty if there is none."""
        matches = (saved for edit, saved in self.done() if isinstance(edit, edit_type) and edit.path == path)
        return next(matches, {})


def applied_swap(model: nn.Module) -> AppliedSwap:
    """Return the swap that the swapped `model` carries."""
    return getattr(model, _ATTRIBUTE)


def fingerprint(model: nn.Module) -> Fingerprint:
    """Return the identity and version of every parameter: cheap, and exact for one process."""
    return {name: (id(p), version_of(p)) for name, p in model.named_parameters()}


def unread_record(model: PreTrainedModel) -> str:
    """Return a sentence about the record in the config of a model without a swap, which transformers read unchecked."""
    if getattr(model.config, "posswap", None) is None:
        return ""
    return " Its config records one that was not checked against its weights: hf_posswap.load checks it."


def check_structure(model: PreTrainedModel) -> None:
    """Check, without a forward, that every edit of the plan is applied to the model.

    Raises:
        SwapVerificationError: something is not as planned.
    """
    plan = applied_swap(model).plan
    for edit in plan.edits:
        problem = "its layer was removed since" if is_removed(model, edit.path) else edit.check(model)
        if problem:
            raise SwapVerificationError(f"{edit.path}: {problem}, so the swap to {plan.named} is no longer intact.")
    if getattr(model.config, "posswap", None) is None:
        raise SwapVerificationError("config.posswap is gone: a checkpoint saved now would load as the native model.")


def check_untouched(model: PreTrainedModel, before: Fingerprint) -> None:
    """Check that only the parameters that the plan's edits touch differ from their `fingerprint` before the swap.

    Raises:
        SwapVerificationError: others changed; the message names them.
    """
    after = fingerprint(model)
    touched = tuple(prefix for edit in applied_swap(model).plan.edits for prefix in edit.touches)
    names = before.keys() | after.keys()
    changed = sorted(n for n in names if before.get(n) != after.get(n) and not n.startswith(touched))
    if changed:
        raise SwapVerificationError(f"parameters outside the plan changed: {', '.join(changed)}.")
