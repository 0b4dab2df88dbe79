"""Decoding one token after a long text: a swapped model, itself before the swap, and a native rotary one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from recipes.bench.harness import Case
from recipes.bench.models import gpt2, gpt_neox

BEFORE, NATIVE = "unpatched", "GPT-NeoX of the same size"


def cases(smoke: bool) -> Iterator[Case]:
    """Give one step after 512 and 2048 tokens."""
    for past in (24,) if smoke else (512, 2048):
        ways = {
            "ours": _step(gpt2(smoke, scheme="rope"), past),
            BEFORE: _step(gpt2(smoke), past),
            NATIVE: _step(gpt_neox(smoke), past),
        }
        goals = {BEFORE: 1.03, NATIVE: 1.0}
        yield Case(f"one token after {past}", ways, goals, tolerance=None, repetitions=21)


def _step(model: Any, past: int) -> Callable[[], Any]:
    ids = torch.randint(0, 512, (1, past + 1), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cache = model(ids[:, :past], use_cache=True).past_key_values

    def run() -> Any:
        logits = model(ids[:, past:], past_key_values=cache, use_cache=True).logits
        cache.crop(-1)
        return logits

    return run
