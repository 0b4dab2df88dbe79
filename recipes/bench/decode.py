"""Decoding one token after a long text: a swapped model, the unswapped one, and a native rotary one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hf_posswap.compat.transformers_calls import cache_argument, cache_in
from hf_posswap.schemes.mechanism import Mechanism
from recipes.bench.harness import Case
from recipes.bench.models import gpt2, gpt_neox

BEFORE, NATIVE, ON_READ = "unpatched", "GPT-NeoX of the same size", "all keys rotated in each step"


def cases(smoke: bool) -> Iterator[Case]:
    """Yield one step after 512 and 2048 tokens."""
    for past in (24,) if smoke else (512, 2048):
        ways = {
            "ours": step_after(gpt2(smoke, scheme="rope"), past),
            BEFORE: step_after(gpt2(smoke), past),
            NATIVE: step_after(gpt_neox(smoke), past),
        }
        goals = {BEFORE: 1.03, NATIVE: 1.0}
        yield Case(f"one token after {past}", ways, goals, tolerance=None, repetitions=21)
        window = past // 4
        settings = {"original_length": 2 * window, "max_length": 4096}
        yield _copies("self_extend", past, smoke, window=window, **settings)
        pairs = 6 if smoke else 32
        yield _copies("longrope", past, smoke, follow="query", long_factor=[2.0] * pairs, **settings)


def _copies(scheme: str, past: int, smoke: bool, **options: Any) -> Case:
    """Return the case of a scheme with keys in two rotations: both cached, compared with rotating all when read."""
    on_read = gpt2(smoke, scheme=scheme, **options)
    for module in on_read.modules():
        if isinstance(module, Mechanism):
            module.keys_per_token = 1
    cached_rotations, unpatched = step_after(gpt2(smoke, scheme=scheme, **options), past), step_after(gpt2(smoke), past)
    ways = {"ours": cached_rotations, ON_READ: step_after(on_read, past), BEFORE: unpatched}
    name = f"one token after {past}, {scheme}"
    return Case(name, ways, {ON_READ: 1.0}, tolerance=1e-3, unlike=frozenset({BEFORE}), repetitions=21)


def step_after(model: Any, past: int) -> Callable[[], Any]:
    """Return a function that runs one step of `model` after `past` tokens, repeatedly."""
    ids = torch.randint(0, 512, (1, past + 1), generator=torch.Generator().manual_seed(0)).to(model.device)
    with torch.no_grad():
        cache = cache_in(model(ids[:, :past], use_cache=True))
    assert cache is not None

    def run() -> Any:
        logits = model(ids[:, past:], **{cache_argument(model): cache}, use_cache=True).logits
        cache.crop(-1)
        return logits

    return run
