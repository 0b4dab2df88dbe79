"""Buffers whose shape follows the length of a model: causal masks, position ids, and buffers that its code fills."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posswap.compat.torch_fake import holds_values
from hf_posswap.families.modules import owner_of
from hf_posswap.patching.edits.edit import Edit, Saved
from hf_posswap.patching.edits.restore import replace_buffer, restore_buffers


def is_mask(buffer: Tensor) -> bool:
    """Return whether a buffer has an entry for each pair of positions, [..., P, P] with P > 1."""
    return buffer.dim() > 1 and buffer.shape[-1] == buffer.shape[-2] > 1


def grown_mask(owner: Any, old: Tensor, length: int) -> Tensor:
    """Return the causal mask `old` [..., P, P] of the attention module `owner` for another length, on its device.

    If its last row does not see all keys, the row gives the window; only the config has a window longer than the mask.
    """
    full = torch.ones((*old.shape[:-2], length, length), dtype=torch.bool, device=old.device).tril()
    window = None
    if holds_values(old) and not old[..., -1, :].all():
        window = int(old.reshape(-1, old.shape[-1])[-1].sum())
    elif getattr(owner, "attention_type", None) == "local":
        window = owner.config.window_size
    return (full if window is None else full & ~full.tril(-window)).to(old.dtype)


def grow_buffer(root: nn.Module, path: str, length: int) -> None:
    """Make the buffer [1, P] or [P] at `path` at least `length` long: position ids continue, others are zeros."""
    owner, leaf = owner_of(root, path)
    setattr(owner, leaf, grown(leaf, getattr(owner, leaf), length))


def grown(name: str, old: Tensor, length: int) -> Tensor:
    """Return the buffer called `name`, [1, P] or [P], at least `length` long."""
    if old.shape[-1] >= length:
        return old
    if name == "position_ids":
        return torch.arange(length, dtype=old.dtype, device=old.device).expand((*old.shape[:-1], -1))
    return torch.zeros((1, length), dtype=old.dtype, device=old.device)


@dataclass(frozen=True, kw_only=True)
class GrowMask(Edit):
    """Gives a causal mask [..., P, P] the length in the config; stock code recreates it in that size.

    Attributes:
        length: P, afterwards.
    """

    length: int

    def apply(self, model: Any, saved: Saved) -> None:
        replace_buffer(model, self.path, lambda owner, old: grown_mask(owner, old, self.length), saved)

    def undo(self, model: Any, saved: Saved) -> None:
        restore_buffers(model, saved)

    def check(self, model: Any) -> str | None:
        length = model.get_buffer(self.path).shape[-1]
        return None if length == self.length else f"its mask has {length} positions instead of {self.length}"

    def reload(self, model: Any) -> None:
        """Nothing: transformers has built the model with the new length."""

    @property
    def touches(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True, kw_only=True)
class ResizeBuffer(Edit):
    """Gives an unused buffer the shape in a fresh model of the new length, filled with zeros.

    transformers fills it when it loads the model, by the length in the config.

    Attributes:
        shape: afterwards.
    """

    shape: tuple[int, ...]

    def apply(self, model: Any, saved: Saved) -> None:
        replace_buffer(model, self.path, lambda owner, old: old.new_zeros(self.shape), saved)

    def undo(self, model: Any, saved: Saved) -> None:
        restore_buffers(model, saved)

    def check(self, model: Any) -> str | None:
        owner, leaf = owner_of(model, self.path)
        shape = tuple(getattr(owner, leaf).shape)
        return None if shape == self.shape else f"it has shape {list(shape)} instead of {list(self.shape)}"

    def reload(self, model: Any) -> None:
        """Nothing: transformers has built the model with the new length."""

    @property
    def touches(self) -> tuple[str, ...]:
        return ()
