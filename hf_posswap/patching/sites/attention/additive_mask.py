"""A mask and a bias as the one tensor that an implementation takes."""

from __future__ import annotations

import torch
from torch import Tensor


def additive_mask(bias: Tensor, mask: Tensor | None, *, causal: bool, query: Tensor, key: Tensor) -> Tensor:
    """Return `bias` with everything masked that `mask`, or causality where it is None, masks.

    Args:
        bias: [B or 1, H, Q, K], float32.
        mask: boolean (True: attend) or additive, [B, 1, Q, K]; None as transformers leaves it out: full attention, or
            causal from the first key where Q > 1.
        causal: whether a left-out mask means causal.
        query: [B, H, Q, D].
        key: [B, G, K, D].
    """
    lowest = torch.finfo(query.dtype).min
    bias = bias.to(torch.promote_types(bias.dtype, query.dtype))  # float32 does not hold float64's lowest
    rows, columns = query.shape[2], key.shape[2]
    if mask is None:
        if causal and rows > 1:
            seen = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()
            bias = bias.masked_fill(~seen, lowest)
        return bias.to(query.dtype)
    mask = mask[..., :columns]
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, lowest).to(query.dtype)
    return (bias + mask).clamp(min=lowest).to(query.dtype)
