"""A training step compared with the time of its operations as large matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from hf_posswap.evaluation.cost import forward_operations
from recipes.bench.harness import Case
from recipes.bench.models import gpt2

ROOF = "the same operations in large products"


def cases(smoke: bool) -> Iterator[Case]:
    """Yield an AdamW step on a RoPE-swapped GPT-2; 0.62 of the peak is a ratio of 1.61."""
    length, batch = (32, 2) if smoke else (512, 4)
    model = gpt2(smoke, scheme="rope").train()
    operations = 3 * batch * forward_operations(model, length)
    yield Case(
        f"training step, {batch} x {length}", {"ours": step(model, batch, length), ROOF: _products(operations, smoke)},
        {ROOF: 1 / 0.62}, tolerance=None,
    )  # fmt: skip


def step(model: torch.nn.Module, batch: int, length: int) -> Callable[[], None]:
    """Return a step of AdamW on random tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 512, (batch, length), generator=torch.Generator().manual_seed(0))
    ids = ids.to(next(model.parameters()).device)

    def run() -> None:
        with torch.enable_grad():
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def _products(operations: float, smoke: bool) -> Callable[[], None]:
    side = 64 if smoke else 1024
    left, right, target = torch.randn(side, side), torch.randn(side, side), torch.empty(side, side)
    count = max(1, round(operations / (2 * side**3)))

    def run() -> None:
        for _ in range(count):
            torch.mm(left, right, out=target)

    return run
