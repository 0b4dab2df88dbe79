"""The peak performance of this machine: matrix products and copies."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from recipes.bench.harness import Case


def cases(smoke: bool) -> Iterator[Case]:
    """Yield a product of square matrices and a copy; operations and bytes are in the names."""
    side = 128 if smoke else 1024
    left, right, target = torch.randn(side, side), torch.randn(side, side), torch.empty(side, side)
    yield Case(f"product, {2 * side**3:.3g} operations", {"matmul": lambda: torch.mm(left, right, out=target)})
    large = torch.randn(side, 16 * side)
    copied = torch.empty_like(large)
    yield Case(f"copy, {8 * large.numel():.3g} bytes read and written", {"copy": lambda: copied.copy_(large)})
