"""The module that replaces removed positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_posswap.compat.torch_fake import holds_values
from hf_posswap.compat.torch_modules import TensorHooks


class NoPositions(TensorHooks):
    """Replaces a position table and adds nothing, whatever it is called with.

    Its buffer `weight` keeps the table's key in the state dict: zeros of the table's shape if stock transformers can
    then run the checkpoint, or a single zero if it cannot, so that the native class fails to load it with a size
    mismatch instead of initializing a random table. A computed table has no such key.

    Args:
        weight: zeros, [P, E] or [1].
        saved: whether it is in the state dict; if not, loading does not fill it, and nothing reads it.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, *, saved: bool = True) -> None:
        super().__init__()
        self.saved = saved
        self.register_buffer("weight", weight, persistent=saved)

    @property
    def is_empty(self) -> bool:
        """Whether the placeholder is all zeros."""
        if not holds_values(self.weight) or not self.saved:
            return True
        return not bool(self.weight.any())

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Return a scalar zero: it broadcasts, does not promote dtypes, and on the CPU combines with any device."""
        return self.weight.new_zeros((), device="cpu" if self.weight.is_meta else None)  # on meta if offloaded

    def extra_repr(self) -> str:
        return f"weight={list(self.weight.shape)}"

    def convert_tensors(self, convert: Callable[[], Any]) -> None:
        was_on_meta = self.weight.is_meta
        super().convert_tensors(convert)
        if was_on_meta and not self.weight.is_meta:  # to_empty leaves memory uninitialized
            self.weight.zero_()

    def write_state(self, state: Any, prefix: str) -> None:
        if not self.is_empty:  # stock classes would read nonzero values as a table
            state[f"{prefix}weight"] = torch.zeros_like(self.weight)
