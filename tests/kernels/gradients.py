"""Whether attention equals another, and its gradients those of the other."""

from __future__ import annotations

import torch
from torch import Tensor

EXACT = 1e-12
"""Of float64: values. Gradients add up more of them."""


def same_with_gradients(found: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    """Check values, and the gradients of `leaves` under the same random weights."""
    torch.testing.assert_close(found, expected, atol=EXACT, rtol=0)
    weight = torch.randn_like(found)
    ours = torch.autograd.grad((found * weight).sum(), leaves)
    theirs = torch.autograd.grad((expected * weight).sum(), leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=20 * EXACT, rtol=0)
