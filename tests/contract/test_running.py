"""All ways of running a swapped decoder agree: at once, step by step, in chunks, in a static cache, in generate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin, StaticCache

from hf_posswap.compat.transformers_cache import self_attention_cache
from tests.contract.models import PADDING
from tests.contract.others import ALL
from tests.contract.pairs import CHANGE, LONGER, NOISE, Pair, gap, logits, once, words
from tests.contract.stacks import HEARD
from tests.stock import with_cache

CHUNKS = {"steps": [1] * LONGER, "chunks": [7, 1, 9, 2, 40]}
CACHES = ("dynamic", pytest.param("static", marks=pytest.mark.few))
UNSTATIC = ("led",)
"""Models whose own code masks a static cache wrongly."""

decoders = pytest.mark.pairs(lambda pair: pair.cached)
generators = pytest.mark.pairs(
    lambda pair: (
        pair.tiny.generates and not pair.stack and (pair.counts_padding_out or pair.relative or not pair.cached)
    )
)


def piecewise(model: Any, ids: Tensor, sizes: list[int], cache: Any, run: Callable[..., Tensor] = logits) -> Tensor:
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


@decoders
@pytest.mark.parametrize("kind", CACHES)
def test_cached_equals_full(pair: Pair, kind: str) -> None:
    if kind == "static" and pair.model in UNSTATIC:
        return
    model = pair.specimen()
    ids = words(2, pair.consistent_length)
    full = pair.logits(model, ids)
    for how, sizes in CHUNKS.items():
        cache = pair.cache(kind, model.config)
        assert gap(piecewise(model, ids, sizes, cache, pair.logits), full) < pair.noise, f"in {how}"
        assert type(self_attention_cache(cache)) in (DynamicCache, StaticCache)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name, tiny in ALL.items() if not tiny.steps])
def test_a_native_class_steps_otherwise_than_it_reads(name: str) -> None:
    model, ids = ALL[name].build(), words(2, 30)
    stepped = piecewise(model, ids, [1] * 30, DynamicCache(config=model.config))
    assert gap(stepped, logits(model, ids)) > CHANGE


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", UNSTATIC)
def test_a_native_class_is_wrong_with_a_static_cache(name: str) -> None:
    model, ids = ALL[name].build(), words(2, 20)
    caches = [StaticCache(config=model.config, max_cache_len=LONGER) for _ in range(2)]
    with torch.no_grad():
        full = model(input_ids=ids, decoder_input_ids=ids).logits
        out = model(
            input_ids=ids, decoder_input_ids=ids, **with_cache(model, EncoderDecoderCache(*caches)), use_cache=True
        )
    assert gap(out.logits, full) > CHANGE


@decoders
def test_a_prefix_is_consistent_exactly_where_it_is_promised(pair: Pair) -> None:
    model = pair.specimen()
    ids = words(1, pair.plan.max_length)
    full = pair.logits(model, ids)
    parts = {length: pair.logits(model, ids[:, :length]) for length in (3, 20, 33, 50) if length < ids.shape[1]}
    worst = max(gap(full[:, :length], part) for length, part in parts.items())
    if pair.plan.cached_equals_full:
        assert worst < NOISE
    else:
        assert worst > NOISE, "the plan says that cached and full forward differ, and they do not"


@pytest.mark.few
@generators
@pytest.mark.parametrize("beams", [1, 3])
def test_generating_from_a_padded_batch_equals_one_by_one(pair: Pair, beams: int) -> None:
    model = pair.specimen()
    prompts = [words(1, length, seed=length) for length in (4, 9)]
    new = pair.consistent_length - 30 if pair.plan.cached_equals_full else 8
    kwargs: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "num_beams": beams}
    alone = [model.generate(p, attention_mask=torch.ones_like(p), **kwargs)[0, p.shape[1] :] for p in prompts]
    width = max(p.shape[1] for p in prompts)
    batch = torch.cat([torch.nn.functional.pad(p, (width - p.shape[1], 0), value=PADDING) for p in prompts])
    together = model.generate(batch, attention_mask=(batch != PADDING).long(), **kwargs)[:, width:]
    assert together.shape == (2, new)
    for row, expected in zip(together, alone, strict=True):
        assert row.tolist() == expected.tolist()


@once
@pytest.mark.pairs(lambda pair: pair.stack)
@pytest.mark.parametrize("beams", [1, 3])
def test_an_encoder_decoder_generates_through_its_cache_what_it_does_without(pair: Pair, beams: int) -> None:
    model = pair.specimen()
    source = HEARD.expand(2, -1, -1) if pair.tiny.hears else words(2, 14)
    new = pair.consistent_length - 2
    kwargs: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "num_beams": beams}
    # of the mixin: Whisper's own splits sound into segments first
    found, expected = (GenerationMixin.generate(model, source, use_cache=cached, **kwargs) for cached in (True, False))
    assert found.shape == (2, new + 1)
    assert torch.equal(found, expected)


@pytest.mark.pairs(lambda pair: pair.stack == "encoder")
@pytest.mark.parametrize("beams", [1, 3])
def test_generating_from_padded_sources_equals_one_by_one(pair: Pair, beams: int) -> None:
    model = pair.specimen()
    sources = [words(1, length, seed=length) for length in (4, 9)]
    kwargs: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "num_beams": beams}
    alone = [model.generate(s, attention_mask=torch.ones_like(s), **kwargs)[0] for s in sources]
    batch = torch.cat([torch.nn.functional.pad(s, (0, 9 - s.shape[1]), value=PADDING) for s in sources])
    together = model.generate(batch, attention_mask=(batch != PADDING).long(), **kwargs)
    for row, expected in zip(together, alone, strict=True):
        assert row.tolist() == expected.tolist()


@pytest.mark.few
@pytest.mark.pairs(lambda pair: pair.tiny.generates and pair.cached and (pair.placed or pair.relative))
@pytest.mark.parametrize("kind", CACHES)
def test_a_padded_batch_steps_through_a_cache(pair: Pair, kind: str) -> None:
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
        assert gap(step[1, -1], expected[i - length]) < pair.noise, f"token {i}"
