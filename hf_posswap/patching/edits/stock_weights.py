"""Checks of the weights of a swapped checkpoint that stock transformers has loaded."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posswap.compat.torch_fake import holds_values

_ROUNDING = 2.0**-7
"""Tolerance relative to the largest entry of a frozen table: twice the error of rounding it once to bfloat16."""
_CASTS = (torch.bfloat16, torch.float16)


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
