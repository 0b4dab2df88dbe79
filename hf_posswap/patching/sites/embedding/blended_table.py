"""What stands in the place of a position table while a blend lasts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_posswap.patching.record.refusals import SENTINEL_SHAPE


class BlendedTable(nn.Module):
    """Stands where a position table was, and gives its rows in the share 1 - w, a new table's in the share w.

    The old table lies under `old` in the state dict, the new one under `new`; one lone zero under `weight` makes the
    native class fail to load it with a size mismatch, instead of taking the old table as it is.

    Args:
        native: the table's module; its own forward does the look-up.
        new: rows of the new table from position 0 on, [P, E], a parameter where they are trained; None: there is none.
        share: w, in [0, 1].
        offset: rows of the old table before position 0.
    """

    native: nn.Embedding
    weight: Tensor
    new: Tensor | None

    def __init__(self, native: nn.Embedding, new: Tensor | None, share: float, offset: int) -> None:
        super().__init__()
        self.__dict__["native"] = native  # not a child: its weight is `old`
        self.old, self.share, self.offset = native.weight, share, offset
        self.register_buffer("weight", native.weight.new_zeros(SENTINEL_SHAPE).detach())
        if isinstance(new, nn.Parameter):
            self.new = new
        else:
            self.register_buffer("new", new)

    def blended(self) -> Tensor:
        """Return the rows that are in force, [offset + P, E]."""
        if self.share == 0:
            return self.old
        old = (1 - self.share) * self.old
        if self.new is None:
            return old
        return torch.cat((self.old[: self.offset], old[self.offset :] + self.share * self.new))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the table's own module returns for these arguments, of the blended rows."""
        return torch.func.functional_call(self.native, {"weight": self.blended()}, args, kwargs)

    def extra_repr(self) -> str:
        return f"share={self.share:g}"
