"""Typical uses of a model: whole texts, padded and packed batches, cached prefill, and decoding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import StaticCache

from hf_posswap.compat.transformers_calls import cache_argument, cache_in

DECODING = "decoding after "


class Sizes(NamedTuple):
    """Sizes of a benchmark; the models are made for half the tokens."""

    length: int
    width: int
    layers: int
    memory: int
    after: tuple[int, ...]


class Situation(NamedTuple):
    """One use of a model: `make` returns a function whose results are compared where `real` is true.

    `window`: sliding window of the model's layers; None: full attention.
    """

    name: str
    make: Callable[[Any], Callable[[], Tensor]]
    real: Tensor | None = None
    window: int | None = None


def situations(sizes: Sizes) -> Iterator[Situation]:
    """Yield the situations of the table."""
    length = sizes.length
    single, pair = ids_of(1, length), ids_of(2, length)
    yield Situation("one row", lambda model: forward(model, single))
    left, right = padded(length)
    yield Situation("left-padded", lambda model: forward(model, pair, **left), left["attention_mask"].bool())
    yield Situation("right-padded", lambda model: forward(model, pair, **right), right["attention_mask"].bool())
    at, mask = packed(length)
    yield Situation("packed by position_ids", lambda model: forward(model, single, position_ids=at))
    yield Situation(
        "packed by a block mask", lambda model: forward(model, single, position_ids=at, attention_mask=mask)
    )
    yield Situation("prefill in two chunks", lambda model: in_chunks(model, single))
    yield Situation("static cache in two chunks", lambda model: in_chunks(model, single, static=True))
    yield Situation("sliding-window layers", lambda model: forward(model, single), window=length // 4)
    yield Situation("gradients of one row", lambda model: gradients(model, single))
    yield Situation("gradients of packed", lambda model: gradients(model, single, position_ids=at))
    yield Situation("gradients of right-padded", lambda model: gradients(model, pair, **right))
    for after in sizes.after:
        yield Situation(f"{DECODING}{after}", functools.partial(step_after, past=after))
    prompts, mask = ids_of(8, length // 8), padded_prompts(8, length // 8)
    yield Situation(
        f"generate of {len(prompts)} rows", lambda model: generating(model, prompts, mask, min(32, length // 16))
    )


def ids_of(rows: int, length: int) -> Tensor:
    """Return random tokens, [rows, length]."""
    return torch.randint(3, 512, (rows, length), generator=torch.Generator().manual_seed(0))


def padded(length: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the inputs of two rows, one padded by a quarter: on the left as in `generate`, and on the right."""
    left, right = torch.ones(2, length, dtype=torch.long), torch.ones(2, length, dtype=torch.long)
    left[1, : length // 4] = 0
    right[1, -(length // 4) :] = 0
    positions = (left.cumsum(1) - 1).masked_fill(left == 0, 1)
    return {"attention_mask": left, "position_ids": positions}, {"attention_mask": right}


def packed(length: int) -> tuple[Tensor, Tensor]:
    """Return positions [1, L] and mask [1, 1, L, L] of two documents in one row, of 5 and 3 eighths of it."""
    first = length * 5 // 8
    document = torch.arange(length) >= first
    mask = torch.ones(length, length, dtype=torch.bool).tril() & (document[:, None] == document)
    return torch.cat((torch.arange(first), torch.arange(length - first)))[None], mask[None, None]


def forward(model: Any, ids: Tensor, **arguments: Any) -> Callable[[], Tensor]:
    """Return a function that runs a whole text."""
    return lambda: model(ids, use_cache=False, **arguments).logits


def padded_prompts(rows: int, length: int) -> Tensor:
    """Return the mask [rows, length] of prompts of different lengths, padded on the left."""
    lengths = torch.linspace(length // 2, length, rows).long()
    return (torch.arange(length).flip(0) < lengths[:, None]).long()


def gradients(model: Any, ids: Tensor, attention_mask: Tensor | None = None, **arguments: Any) -> Callable[[], Tensor]:
    """Return a function that runs forward and backward, and returns the gradients of the last layer's queries."""
    labels = ids if attention_mask is None else ids.masked_fill(attention_mask == 0, -100)

    def run() -> Tensor:
        with torch.enable_grad():
            loss = model(ids, attention_mask=attention_mask, labels=labels, use_cache=False, **arguments).loss
            loss.backward()
        gradient = model.model.layers[-1].self_attn.q_proj.weight.grad
        model.zero_grad()
        return gradient

    return run


def generating(model: Any, ids: Tensor, mask: Tensor, tokens: int) -> Callable[[], Tensor]:
    """Return a function that generates `tokens` tokens for each of a batch of prompts, and returns their logits."""

    def run() -> Tensor:
        output = model.generate(
            ids, attention_mask=mask, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False,
            pad_token_id=0, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        return torch.stack(output.logits)

    return run


def in_chunks(model: Any, ids: Tensor, *, static: bool = False) -> Callable[[], Tensor]:
    """Return a function that runs a text in two halves, the second with the cache of the first."""
    half = ids.shape[1] // 2

    def run() -> Tensor:
        cache = StaticCache(config=model.config, max_cache_len=ids.shape[1]) if static else None
        first = model(ids[:, :half], **{cache_argument(model): cache}, use_cache=True)
        second = model(ids[:, half:], **{cache_argument(model): cache_in(first)})
        return torch.cat((first.logits, second.logits), dim=1)

    return run


def step_after(model: Any, past: int, steps: int = 8) -> Callable[[], Tensor]:
    """Return a function that decodes `steps` tokens one by one after a text of `past`."""
    ids = ids_of(1, past + steps)
    with torch.no_grad():
        cache = cache_in(model(ids[:, :past], use_cache=True))
    assert cache is not None

    def run() -> Tensor:
        logits = [model(ids[:, n : n + 1], **{cache_argument(model): cache}).logits for n in range(past, past + steps)]
        cache.crop(-steps)
        return torch.cat(logits, dim=1)

    return run
