"""Perplexity of one long text and over sliding windows, compared with transformers' loss and its documented loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hf_posswap.evaluation.losses import sliding_windows, window_losses
from hf_posswap.evaluation.scoring import Scorer
from recipes.bench.harness import Case
from recipes.bench.models import llama

THEIRS, LOOP = "model(ids, labels=ids)", "transformers' documented loop"


def cases(smoke: bool) -> Iterator[Case]:
    """Yield one pass over a text, and the mean loss over windows with a stride."""
    length = 96 if smoke else 8192
    ways = {way: _pass(way, length, smoke) for way in ("ours", THEIRS)}
    yield Case(
        f"perplexity of {length} tokens", ways, {THEIRS: 1.0}, repetitions=3,
        memory=None if smoke else {"length": length}, memory_goals={THEIRS: 0.1},
    )  # fmt: skip
    window, stride, length = (32, 8, 96) if smoke else (1024, 256, 4096)
    model, ids = llama(smoke), _ids(length, smoke)
    windows, scorer = sliding_windows(length, window, stride), Scorer(model)

    def ours() -> Tensor:
        return torch.tensor([losses.mean() for losses in window_losses(scorer, ids[0].numpy(), windows)])

    def loop() -> Tensor:
        means = []
        for window_span in windows:
            read = ids[:, window_span.start : window_span.stop]
            targets = read.clone()
            targets[:, : -window_span.scored] = -100
            means.append(model(read, labels=targets).loss)
        return torch.stack(means)

    yield Case(f"sliding windows of {window} by {stride}", {"ours": ours, LOOP: loop}, {LOOP: 0.5}, repetitions=3)


def _ids(length: int, smoke: bool) -> Tensor:
    return torch.randint(0, 64 if smoke else 32_000, (1, length), generator=torch.Generator().manual_seed(0))


def _pass(way: str, length: int, smoke: bool) -> Callable[[], Tensor]:
    model, ids = llama(smoke), _ids(length, smoke)
    if way == "ours":
        scorer = Scorer(model)
        return lambda: scorer.nll(ids).mean()
    return lambda: model(ids, labels=ids, use_cache=False).loss


def apart(way: str, length: int) -> Callable[[], Any]:
    """Return the function whose memory is measured in a separate process."""
    run = _pass(way, length, False)

    def without_gradients() -> Any:
        with torch.no_grad():
            return run()

    return without_gradients
