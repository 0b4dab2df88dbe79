"""The module that stands where a swap took positions away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_posswap.compat.torch_fake import holds_values
from hf_posswap.compat.torch_modules import TensorHooks


class NoPositions(TensorHooks):
    """Stands where a position table was, and adds nothing, whatever it is called with.

    Its buffer `weight` keeps the table's place in the state dict: zeros of the table's shape where stock transformers
    can then run the checkpoint as it is, or one lone zero where it cannot, so that the native class fails to load it
    with a size mismatch instead of inventing a random table. A table that is computed has no such place.

    Args:
        weight: zeros, [P, E] or [1].
        saved: whether it is in the state dict; if not, nobody fills it when the model is loaded, and nothing reads it.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, *, saved: bool = True) -> None:
        super().__init__()
        self.saved = saved
        self.register_buffer("weight", weight, persistent=saved)

    @property
    def is_empty(self) -> bool:
        """Whether nothing but zeros stands for the table."""
        if not holds_values(self.weight) or not self.saved:
            return True
        return not bool(self.weight.any())

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Return a zero without dimensions: it broadcasts, promotes no dtype, and on the CPU it meets any device."""
        return self.weight.new_zeros((), device="cpu" if self.weight.is_meta else None)  # on meta: it is offloaded

    def extra_repr(self) -> str:
        return f"weight={list(self.weight.shape)}"

    def convert_tensors(self, convert: Callable[[], Any]) -> None:
        was_on_meta = self.weight.is_meta
        super().convert_tensors(convert)
        if was_on_meta and not self.weight.is_meta:  # to_empty gives raw memory
            self.weight.zero_()

    def write_state(self, state: Any, prefix: str) -> None:
        if not self.is_empty:  # what was loaded or left there would be a table to stock classes
            state[f"{prefix}weight"] = torch.zeros_like(self.weight)
