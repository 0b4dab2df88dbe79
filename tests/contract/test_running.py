"""All ways of running a swapped decoder agree: at once, step by step, in chunks, in a static cache, in generate."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from hf_posswap.testing.contract.points import running
from hf_posswap.testing.contract.points.running import piecewise
from tests.contract.limits import UNSTATIC
from tests.contract.others import ALL
from tests.contract.pairs import CHANGE, LONGER, gap, logits, words
from tests.contract.points import as_tests
from tests.stock import with_cache

globals().update(as_tests(running))  # a test for each point


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
