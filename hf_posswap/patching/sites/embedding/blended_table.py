"""The module that replaces a position table during a blend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_posswap.patching.record.refusals import SENTINEL_SHAPE


class BlendedTable(nn.Module):
    """Replaces a position table: returns its rows with weight 1 - w plus a new table's rows with weight w.

    In the state dict the old table is `old` and the new one `new`. A single zero as `weight` makes the native class
    fail to load it with a size mismatch, instead of using the old table unchanged.

    Args:
        native: the table's module; its own forward does the look-up.
        new: rows of the new table from position 0 on, [P, E], a parameter if they are trained; None: there is none.
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
        """Return the blended rows, [offset + P, E]."""
        if self.share == 0:
            return self.old
        old = (1 - self.share) * self.old
        if self.new is None:
            return old
        return torch.cat((self.old[: self.offset], old[self.offset :] + self.share * self.new))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the result of the table's own module for these arguments, with the blended rows."""
        return torch.func.functional_call(self.native, {"weight": self.blended()}, args, kwargs)

    def extra_repr(self) -> str:
        return f"share={self.share:g}"
