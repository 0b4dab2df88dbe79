"""Angles that are exact modulo a turn, compared with transformers' float32 product of a position and theta."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_posswap.rope_math import CosSin, Frequencies, cos_sin, default_inv_freq
from hf_posswap.schemes import rope
from recipes.bench.decode import step_after
from recipes.bench.harness import Case
from recipes.bench.models import gpt2

PLAIN = "product in float32"


def cases(smoke: bool) -> Iterator[Case]:
    """Yield tables of cos and sin near position 0 and far from it, and one decoding step of a model."""
    frequencies = Frequencies.of(default_inv_freq(10000.0, 64, torch.float64)).to("cpu")
    for tokens in (1, 64) if smoke else (1, 1024, 8192):
        for start in (0, 100_000):
            positions = torch.arange(start, start + tokens)[None]
            ways: dict[str, Callable[[], Any]] = {
                "ours": partial(cos_sin, positions, frequencies),
                PLAIN: partial(product, positions, frequencies),
            }
            name = f"cos and sin of {tokens} positions from {start}"
            yield Case(name, ways, tolerance=None, repetitions=21 if tokens > 1 else 201)
    for past in (24,) if smoke else (512, 2048):
        step = step_after(gpt2(smoke, scheme="rope"), past)
        ways = {"ours": step, PLAIN: partial(_with_product, step)}
        yield Case(f"one token after {past}", ways, {PLAIN: 1.02}, tolerance=1e-3, repetitions=21)


def product(positions: Tensor, frequencies: Frequencies) -> CosSin:
    """Return cos and sin of float32 products, as transformers' rotary modules compute them."""
    angles = positions[:, None, :, None].float() * frequencies.inv_freq
    factor = frequencies.attention_factor
    return CosSin(angles.cos() * factor, angles.sin() * factor)


def _with_product(step: Callable[[], Any]) -> Any:
    """Return the result of `step` with angles from float32 products."""
    original = rope.cos_sin  # type: ignore[attr-defined]
    rope.cos_sin = product  # type: ignore[attr-defined]
    try:
        return step()
    finally:
        rope.cos_sin = original  # type: ignore[attr-defined]
