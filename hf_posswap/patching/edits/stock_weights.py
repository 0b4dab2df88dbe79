"""What the weights of a checkpoint that stock transformers has loaded must be under a swap, and are not."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posswap.compat.torch_fake import holds_values

_ROUNDING = 2.0**-7
"""Of the largest entry of a frozen table: what rounding it to bfloat16, once, takes from it, twice over."""
_CASTS = (torch.bfloat16, torch.float16)


def not_zero(weight: Tensor, rows: int | None = None) -> str | None:
    """Return what is wrong with a tensor [P, E] that was taken away, of which `rows` zero rows are left; or None."""
    if rows is not None and len(weight) != rows:
        return f"has {len(weight)} rows instead of {rows}"
    if holds_values(weight) and bool(weight.any()):
        return "was taken away, and holds other values than zeros"
    return None


def not_rows(weight: Tensor, expected: Tensor | None, count: int) -> str | None:
    """Return what is wrong with a table [P, E] that a swap wrote; or None.

    Args:
        weight: as it was loaded.
        expected: what the formula of a frozen table gives; None: the rows are trained, or on meta.
        count: P, as planned.
    """
    if len(weight) != count:
        return f"has {len(weight)} positions instead of {count}"
    if expected is None:
        return None
    found = weight.detach().float().cpu()
    worst, largest = (found - expected).abs().max().item(), found.abs().max().item()
    if not worst <= _ROUNDING * largest:  # NaN fails too
        return f"is off by up to {worst:.2g} from what its formula gives"
    return None


def holds(weight: Tensor, expected: Tensor) -> bool:
    """Return whether `weight` holds `expected` in its dtype, also where the model was cast to half precision once."""
    found = weight.detach().cpu()
    return any(torch.equal(found, expected.to(cast).to(found.dtype)) for cast in (found.dtype, *_CASTS))
