"""All ways of running a swapped decoder agree: at once, step by step, in chunks, in a static cache, in generate."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, StaticCache

from hf_posswap.compat.transformers_calls import self_attention_cache
from hf_posswap.testing.contract.checks import NOISE, check, check_same, gap
from hf_posswap.testing.contract.models import PADDING
from hf_posswap.testing.contract.pairs import HEARD, LONGER, Pair, logits, with_cache, words
from hf_posswap.testing.contract.point import cached, once, point

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

CHUNKS = {"steps": [1] * LONGER, "chunks": [7, 1, 9, 2, 40]}
CACHES = ("dynamic", "static")


def generates(pair: Pair) -> bool:
    """Return whether `generate` can be asked for a padded batch of the pair."""
    can = pair.tiny.generates and not pair.stack
    return can and (pair.counts_padding_out or pair.relative or not pair.cached)


def piecewise(
    model: PreTrainedModel, ids: Tensor, sizes: list[int], cache: Cache, run: Callable[..., Tensor] = logits
) -> Tensor:
    """Return the logits, by `run`, of `ids` fed in pieces of `sizes` through `cache`."""
    pieces, start = [], 0
    for size in sizes:
        end = min(start + size, ids.shape[1])
        if start < end:
            mask = torch.ones(ids.shape[0], end, dtype=torch.long)
            pieces.append(
                run(model, ids[:, start:end], attention_mask=mask, **with_cache(model, cache), use_cache=True)
            )
        start = end
    return torch.cat(pieces, dim=1)


def check_same_texts(texts: Tensor, reference: Tensor, meaning: str) -> None:
    """Raise unless two generated texts are the same.

    Raises:
        BrokenPromiseError: they are not.
    """
    check(texts.tolist() == reference.tolist(), f"{meaning}: {reference.tolist()}", texts.tolist())


@point(cached, parameter="kind", values=CACHES, few_values=("static",), of_stock=True)
def cached_equals_full(pair: Pair, kind: str) -> None:
    """A forward through a cache, in steps and in chunks, gives the logits of one forward."""
    if kind == "static" and pair.limits.unstatic:
        return
    model = pair.specimen()
    ids = words(2, pair.consistent_length)
    full = pair.logits(model, ids)
    for how, sizes in CHUNKS.items():
        cache = pair.cache(kind, model.config)
        actual = piecewise(model, ids, sizes, cache, pair.logits)
        check_same(actual, full, pair.noise, f"in {how} through a {kind} cache, the logits of one forward")
        cache_class = type(self_attention_cache(cache))
        check(cache_class in (DynamicCache, StaticCache), "the cache that was given", cache_class.__name__)


@point(cached)
def a_prefix_is_consistent_exactly_where_it_is_promised(pair: Pair) -> None:
    """The logits of a token are the same however many tokens follow, exactly where prefix_consistent promises it."""
    model = pair.specimen()
    ids = words(1, pair.plan.max_length)
    full = pair.logits(model, ids)
    by_length = {length: pair.logits(model, ids[:, :length]) for length in (3, 20, 33, 50) if length < ids.shape[1]}
    worst = max(gap(full[:, :length], logits_of_length) for length, logits_of_length in by_length.items())
    if pair.plan.cached_equals_full:
        expected = f"the same logits of a prefix alone and in a longer text, up to {NOISE}: the traits promise it"
        check(worst < NOISE, expected, f"they differ by {worst:.3g}")
    else:
        expected = "logits of a prefix that differ in a longer text: the plan says that cached and full forward differ"
        check(worst > NOISE, expected, f"they differ by {worst:.3g}")


@point(generates, parameter="beams", values=(1, 3), few=True, of_stock=True)
def generating_from_a_padded_batch_equals_one_by_one(pair: Pair, beams: int) -> None:
    """Generating from a padded batch gives what each prompt gives alone."""
    model = pair.specimen()
    prompts = [words(1, length, seed=length) for length in (4, 9)]
    new = pair.consistent_length - 30 if pair.plan.cached_equals_full else 8
    kwargs: dict[str, object] = {"max_new_tokens": new, "do_sample": False, "num_beams": beams}
    alone = [model.generate(p, attention_mask=torch.ones_like(p), **kwargs)[0, p.shape[1] :] for p in prompts]
    width = max(p.shape[1] for p in prompts)
    batch = torch.cat([torch.nn.functional.pad(p, (width - p.shape[1], 0), value=PADDING) for p in prompts])
    together = model.generate(batch, attention_mask=(batch != PADDING).long(), **kwargs)[:, width:]
    check(together.shape == (2, new), f"2 rows of {new} new tokens", tuple(together.shape))
    for row, expected in zip(together, alone, strict=True):
        check_same_texts(row, expected, "the text of the prompt alone")


@point(once, lambda pair: bool(pair.stack), parameter="beams", values=(1, 3), of_stock=True)
def an_encoder_decoder_generates_through_its_cache_what_it_does_without(pair: Pair, beams: int) -> None:
    """An encoder-decoder generates through its cache what it does without one."""
    model = pair.specimen()
    source = HEARD.expand(2, -1, -1) if pair.tiny.hears else words(2, 14)
    new = pair.consistent_length - 2
    kwargs: dict[str, object] = {"max_new_tokens": new, "do_sample": False, "num_beams": beams}
    # of the mixin: Whisper's own splits sound into segments first
    actual, expected = (GenerationMixin.generate(model, source, use_cache=on, **kwargs) for on in (True, False))
    check(actual.shape == (2, new + 1), f"2 rows of {new + 1} tokens", tuple(actual.shape))
    check_same_texts(actual, expected, "the text without a cache")


@point(lambda pair: pair.stack == "encoder", parameter="beams", values=(1, 3), of_stock=True)
def generating_from_padded_sources_equals_one_by_one(pair: Pair, beams: int) -> None:
    """Generating from padded sources gives what each source gives alone."""
    model = pair.specimen()
    sources = [words(1, length, seed=length) for length in (4, 9)]
    kwargs: dict[str, object] = {"max_new_tokens": 10, "do_sample": False, "num_beams": beams}
    alone = [model.generate(s, attention_mask=torch.ones_like(s), **kwargs)[0] for s in sources]
    batch = torch.cat([torch.nn.functional.pad(s, (0, 9 - s.shape[1]), value=PADDING) for s in sources])
    together = model.generate(batch, attention_mask=(batch != PADDING).long(), **kwargs)
    for row, expected in zip(together, alone, strict=True):
        check_same_texts(row, expected, "the text of the source alone")


@point(
    lambda pair: pair.tiny.generates and pair.cached and (pair.placed or pair.relative),
    parameter="kind",
    values=CACHES,
    few=True,
    few_values=("static",),
    of_stock=True,
)
def a_padded_batch_steps_through_a_cache(pair: Pair, kind: str) -> None:
    """A left-padded batch in steps through a cache gives the logits of each row alone."""
    model = pair.specimen()
    ids, padding, length = words(2, 20), 6, 14
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    expected = pair.logits(model, ids[1:, padding:])[0, -(20 - length) :]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = pair.cache(kind, model.config)
    pair.logits(model, ids[:, :length], attention_mask=mask[:, :length], position_ids=positions[:, :length],
           **with_cache(model, cache))  # fmt: skip
    for i in range(length, 20):
        step = pair.logits(
            model,
            ids[:, i : i + 1],
            attention_mask=mask[:, : i + 1],
            position_ids=positions[:, i : i + 1],
            **with_cache(model, cache),
        )
        check_same(step[1, -1], expected[i - length], pair.noise, f"at token {i}, the logits of the row alone")
