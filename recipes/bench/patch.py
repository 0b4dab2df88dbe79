"""A swapped model compared with itself before the swap: prefill and a training step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from recipes.bench.harness import Case
from recipes.bench.models import gpt2, gpt_neox
from recipes.bench.train import step

BEFORE, NATIVE = "unpatched", "GPT-NeoX of the same size"


def cases(smoke: bool) -> Iterator[Case]:
    """Yield prefills with RoPE and ALiBi, and a training step with RoPE."""
    lengths = (32,) if smoke else (512, 1024)
    for scheme in ("rope", "alibi"):
        swapped, before, native = gpt2(smoke, scheme=scheme), gpt2(smoke), gpt_neox(smoke)
        for length in lengths:
            ids = torch.randint(0, 512, (1, length), generator=torch.Generator().manual_seed(0))
            ways = {
                "ours": lambda ids=ids, model=swapped: model(ids).logits,
                BEFORE: lambda ids=ids, model=before: model(ids).logits,
                NATIVE: lambda ids=ids, model=native: model(ids).logits,
            }
            yield Case(f"prefill with {scheme}, {length}", ways, {BEFORE: 1.03}, tolerance=None)
    batch, length = (2, 32) if smoke else (2, 512)
    steps = {
        "ours": step(gpt2(smoke, scheme="rope").train(), batch, length),
        BEFORE: step(gpt2(smoke).train(), batch, length),
    }
    yield Case(f"training step with rope, {batch} x {length}", steps, {BEFORE: 1.015}, tolerance=None)
