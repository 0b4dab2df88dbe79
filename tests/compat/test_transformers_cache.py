"""Where tokens stand in the caches of the transformers that is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, StaticCache, cache_utils

from hf_posswap.compat import transformers_cache

CONFIG = LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
CACHES = {
    "dynamic": lambda: DynamicCache(),
    "static": lambda: StaticCache(CONFIG, max_cache_len=12),
    "sliding": lambda: DynamicCache(config=LlamaConfig(**CONFIG.to_diff_dict(), sliding_window=4)),
}


def filled(kind: str, tokens: int) -> Any:
    cache = CACHES[kind]()
    for _ in range(tokens):
        cache.update(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8), 0)
    return cache


@pytest.mark.parametrize("kind", CACHES)
def test_tokens_before(kind: str) -> None:
    assert [int(transformers_cache.tokens_before(filled(kind, tokens), 0)) for tokens in (0, 3, 7)] == [0, 3, 7]


@pytest.mark.parametrize(("kind", "seen"), [("dynamic", (9, 0)), ("static", (12, 0))])
def test_keys_of_call(kind: str, seen: tuple[int, int]) -> None:
    keys, first = transformers_cache.keys_of_call(filled(kind, 7), 2, 0)
    assert (keys, int(first)) == seen


def test_keys_of_call_are_those_that_update_returns() -> None:
    for kind in CACHES:
        for tokens in (0, 3, 7):
            cache = filled(kind, tokens)
            keys, _ = transformers_cache.keys_of_call(cache, 2, 0)
            returned, _ = cache.update(torch.ones(1, 2, 2, 8), torch.ones(1, 2, 2, 8), 0)
            assert returned.shape[2] == keys, (kind, tokens)


def test_cache_layer_class(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {**cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "ours": cache_utils.DynamicLayer}
    monkeypatch.setattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING", own)
    native = type("Typed", (cache_utils.DynamicLayer,), {"_layer_type": "ours"})
    assert own["ours"] is native  # transformers is told of each subclass with a type
    made = transformers_cache.cache_layer_class("Made", (native,), {"kept": 1})
    assert own["ours"] is native
    assert (made.__name__, made.__bases__, made.kept) == ("Made", (native,), 1)  # type: ignore[attr-defined]
