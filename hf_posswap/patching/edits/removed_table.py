"""The module in the place of a removed table, and the check of weights that stock transformers loaded into one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_posswap.compat.torch_modules import TensorHooks
from hf_posswap.compat.torch_tensors import holds_values

_ROUNDING = 2.0**-7
"""Tolerance relative to the largest entry of a frozen table: twice the error of rounding it once to bfloat16."""
_CASTS = (torch.bfloat16, torch.float16)


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

    def forward(self, *_: object, **__: object) -> Tensor:
        """Return a scalar zero: it broadcasts, does not promote dtypes, and on the CPU combines with any device."""
        return self.weight.new_zeros((), device="cpu" if self.weight.is_meta else None)  # on meta if offloaded

    def extra_repr(self) -> str:
        return f"weight={list(self.weight.shape)}"

    def convert_tensors(self, convert: Callable[[], object]) -> None:
        was_on_meta = self.weight.is_meta
        super().convert_tensors(convert)
        if was_on_meta and not self.weight.is_meta:  # to_empty leaves memory uninitialized
            self.weight.zero_()

    def write_state(self, state: dict[str, Tensor], prefix: str) -> None:
        if not self.is_empty:  # stock classes would read nonzero values as a table
            state[f"{prefix}weight"] = torch.zeros_like(self.weight)


def not_zero(weight: Tensor, rows: int | None = None) -> str | None:
    """Return the problem with a removed tensor [P, E], of which `rows` zero rows should be left; or None."""
    if rows is not None and len(weight) != rows:
        return f"has {len(weight)} rows instead of {rows}"
    if holds_values(weight) and bool(weight.any()):
        return "was removed, and is not all zeros"
    return None


def not_rows(weight: Tensor, expected: Tensor | None, count: int) -> str | None:
    """Return the problem with a table [P, E] that a swap wrote; or None.

    Args:
        weight: the loaded table.
        expected: the rows by the formula of a frozen table; None: the rows are trained, or on meta.
        count: P, as planned.
    """
    if len(weight) != count:
        return f"has {len(weight)} positions instead of {count}"
    if expected is None:
        return None
    actual = weight.detach().float().cpu()
    worst, largest = (actual - expected).abs().max().item(), actual.abs().max().item()
    if not worst <= _ROUNDING * largest:  # NaN fails too
        return f"differs by up to {worst:.2g} from its formula"
    return None


def holds(weight: Tensor, expected: Tensor) -> bool:
    """Return whether `weight` equals `expected` in its dtype, allowing for one cast to half precision."""
    actual = weight.detach().cpu()
    return any(torch.equal(actual, expected.to(cast).to(actual.dtype)) for cast in (actual.dtype, *_CASTS))
