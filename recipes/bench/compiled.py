"""Compiled swapped models compared with the compiled unswapped one: forward, gradients, static-cache decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from transformers import StaticCache

from hf_posswap.compat.transformers_calls import cache_argument
from recipes.bench.batches import Sizes, forward, gradients, ids_of
from recipes.bench.harness import Case
from recipes.bench.situations import UNPATCHED, llama

SCHEMES = ("yarn", "alibi", "t5", "self_extend")
BEFORE, EAGER = "unpatched, compiled", "not compiled"
FULL, SMALL = Sizes(1024, 512, 3, 0, ()), Sizes(64, 64, 1, 0, ())


def cases(smoke: bool) -> Iterator[Case]:
    """Yield a case for each kind of run and each scheme, each as one graph of fixed lengths."""
    sizes = SMALL if smoke else FULL
    runs: dict[str, Callable[..., Callable[[], Tensor]]] = {
        "forward": forward,
        "gradients": gradients,
        "decoding, static cache": steps,
    }
    for name, run in runs.items():
        for scheme in SCHEMES[1:3] if smoke else SCHEMES:
            torch.compiler.reset()  # code compiled for other models counts towards dynamo's limit
            ids = ids_of(1, sizes.length)
            eager = llama(scheme, sizes)
            ways = {"ours": run(compiled(scheme, sizes), ids), EAGER: run(eager, ids)}
            ways[BEFORE] = run(compiled(UNPATCHED, sizes), ids)
            yield Case(
                f"{name}, {scheme}", ways, {BEFORE: 1.02}, tolerance=1e-3, unlike=frozenset({BEFORE}), repetitions=9
            )


def compiled(scheme: str, sizes: Sizes) -> Any:
    """Return a model whose forward is one graph."""
    model = llama(scheme, sizes)
    model.forward = torch.compile(model.forward, fullgraph=True, dynamic=False)
    return model


def steps(model: Any, ids: Tensor, count: int = 8) -> Callable[[], Tensor]:
    """Return a function that decodes the last `count` of `ids` one by one, after a static cache of the earlier ones."""
    past = ids.shape[1] - count
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1])
    with torch.no_grad():
        type(model).forward(model, ids[:, :past], **{cache_argument(model): cache})

    def run() -> Tensor:
        with torch.no_grad():
            logits = [
                model(ids[:, n : n + 1], **{cache_argument(model): cache}).logits.clone()
                for n in range(past, past + count)
            ]
        for layer in cast("Any", cache).layers:  # a static cache has no crop: later entries are overwritten
            layer.cumulative_length.sub_(count)
        return torch.cat(logits, dim=1)

    return run
