"""What a swapped model carries of its swap, in `model._posswap`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.utils.hooks import RemovableHandle

from hf_posswap.patching.edits.edit import Edit, Saved
from hf_posswap.patching.edits.offload import OffloadAgain
from hf_posswap.patching.plan.swap_plan import SwapPlan


@dataclass
class AppliedSwap:
    """A plan in force.

    Attributes:
        plan: of the swap as it stands.
        config: the model's config from before the swap; the model has a copy of its own since.
        saved: what each edit took out of the model, in the order of the plan's edits; None for a model that was loaded
            swapped: what was there before is not known.
        offloaded: what puts weights back to where accelerate had them.
        fitted: whether weights of the model itself were fitted to the swap (`fit_rotation`), so that undoing it would
            not give back what was there before.
        guard: handle of the hook that keeps a whole around the model from being saved without the record.
    """

    plan: SwapPlan
    config: Any
    saved: list[Saved] | None = None
    offloaded: list[OffloadAgain] = field(default_factory=list)
    fitted: bool = False
    guard: RemovableHandle | None = None

    @property
    def can_undo(self) -> bool:
        """Whether the original mechanism can be had back."""
        return self.saved is not None

    def done(self) -> list[tuple[Edit, Saved]]:
        """Return the edits that were made, or begun, each with what it saved."""
        return list(zip(self.plan.edits, self.saved or (), strict=False))

    def saved_of(self, kind: type[Edit], path: str) -> Saved:
        """Return what the edit of this kind at `path` saved; empty where there is none."""
        found = (saved for edit, saved in self.done() if isinstance(edit, kind) and edit.path == path)
        return next(found, {})
