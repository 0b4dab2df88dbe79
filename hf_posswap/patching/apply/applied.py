"""The state of a swap that a swapped model keeps in `model._posswap`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.utils.hooks import RemovableHandle

from hf_posswap.patching.edits.edit import Edit, Saved
from hf_posswap.patching.edits.restore import OffloadAgain
from hf_posswap.patching.plan.swap_plan import SwapPlan


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
            set it; None: the model was swapped by itself, or the swap left the length as it was.
    """

    plan: SwapPlan
    config: Any
    saved: list[Saved] | None = None
    offloaded: list[OffloadAgain] = field(default_factory=list)
    fitted: bool = False
    guard: RemovableHandle | None = None
    sequence_lengths: tuple[int | None, int] | None = None

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
