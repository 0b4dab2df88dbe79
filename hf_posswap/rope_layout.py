"""Half-split and interleaved rotary layouts: the permutation of projection rows between them.

A rotary pair lies at (i, i + R/2) of a head in the half-split layout and at (2i, 2i + 1) in the interleaved one. Scores
are sums over pairs, so permuting the rows of the query and the key projection alike turns a model of the one layout
into one of the other that computes the same. Su et al. 2021, https://arxiv.org/abs/2104.09864, section 3.4.2.

To turn a half-split model into an interleaved one, permute the weight (and bias) of `q_proj` with the query heads and
of `k_proj` with the key heads, from "half" to "interleaved", and `patch_model(model, "rope", layout="interleaved")`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Layout

LAYOUTS: tuple[Layout, ...] = ("half", "interleaved")


def permute_rows(weight: Tensor, heads: int, rotary_dim: int, source: Layout, target: Layout) -> Tensor:
    """Return the rows of a query or key projection, in `source` layout, in the order of `target` layout.

    Args:
        weight: [H D, E] of a Linear, or its bias or a norm's weight [H D]; heads one after the other.
        heads: H of the query projection, G of the key projection.
        rotary_dim: R, the rotated dimensions of a head; the other D - R stay where they are.
        source: the current layout of the pairs.
        target: the layout to convert to.

    Returns:
        A new tensor of the same shape, dtype and device.

    Raises:
        SchemeError: the rows cannot be divided among the heads, R does not fit a head, or no such layout.

    Example:
        >>> permute_rows(torch.arange(6), heads=1, rotary_dim=4, source="half", target="interleaved")
        tensor([0, 2, 1, 3, 4, 5])
    """
    for name, layout in (("source", source), ("target", target)):
        if layout not in LAYOUTS:
            raise SchemeError(f"permute_rows: {name} must be one of 'half', 'interleaved', got {layout!r}.")
    rows = weight.shape[0] if weight.dim() else 0
    if heads < 1 or not rows or rows % heads:
        raise SchemeError(
            f"permute_rows: needs a whole number of rows for each head, got shape {tuple(weight.shape)} and {heads} "
            "heads; give the key projection's own number of heads for its weight."
        )
    width = rows // heads
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > width:
        raise SchemeError(
            f"permute_rows: rotary_dim must be even, at least 2 and at most the {width} dimensions of a head, got "
            f"{rotary_dim}."
        )
    order = torch.arange(width, device=weight.device)
    if source != target:
        shape = (2, rotary_dim // 2) if source == "half" else (rotary_dim // 2, 2)
        order[:rotary_dim] = order[:rotary_dim].view(shape).T.flatten()
    return weight.unflatten(0, (heads, width))[:, order].flatten(0, 1)
