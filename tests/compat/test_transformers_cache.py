"""Where tokens stand in the caches of the transformers that is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, StaticCache, cache_utils

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


def test_is_growing_layer() -> None:
    """Layers that hold all tokens, as `keys` and `values`, in their order: those that a cache begins with by itself."""
    assert transformers_cache.is_growing_layer(type(filled("dynamic", 3).layers[0]))
    for other in (cache_utils.StaticLayer, cache_utils.DynamicSlidingWindowLayer, cache_utils.QuantizedLayer):
        assert not transformers_cache.is_growing_layer(other)
    assert filled("dynamic", 3).layers[0].keys.shape[-2] == 3


def test_self_attention_cache() -> None:
    own, cross = DynamicCache(), DynamicCache()
    assert transformers_cache.self_attention_cache(EncoderDecoderCache(own, cross)) is own
    assert transformers_cache.self_attention_cache(own) is own


@pytest.mark.parametrize("kind", CACHES)
def test_update_of_a_cache_view(kind: str) -> None:
    """A view is of the cache's class, and what is written into it stands in the cache, its keys changed."""
    transformers_cache.prepare_views()
    cache, plain = filled(kind, 3), filled(kind, 3)
    view = transformers_cache.cache_view(cache, lambda key: 2 * key)
    assert isinstance(view, type(cache))
    assert int(view.get_seq_length(0)) == 3
    written, again = (torch.full((1, 2, 1, 8), 5.0) for _ in range(2))
    keys, values = view.update(written, again, 0)
    expected_keys, expected_values = plain.update(2 * written, again, 0)
    assert torch.equal(keys, expected_keys)
    assert torch.equal(values, expected_values)
    assert int(cache.get_seq_length(0)) == int(view.get_seq_length(0)) == 4
    assert torch.equal(cache.layers[0].keys, plain.layers[0].keys)


def test_cache_view_of_an_encoder_decoder_cache() -> None:
    cache = EncoderDecoderCache(filled("dynamic", 3), filled("dynamic", 2))
    view = transformers_cache.cache_view(cache, lambda key: 2 * key)
    view.self_attention_cache.update(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8), 0)
    assert cache.self_attention_cache.layers[0].keys[0, 0, :, 0].tolist() == [1, 1, 1, 2]
    assert view.cross_attention_cache is cache.cross_attention_cache
    assert view.is_updated is cache.is_updated


def test_prepare_views() -> None:
    transformers_cache.prepare_views()
    assert isinstance(transformers_cache.cache_view(DynamicCache(), lambda key: key), DynamicCache)


def test_write_keys() -> None:
    cache, arguments = filled("dynamic", 3), {}  # type: ignore[var-annotated]
    keys, _ = transformers_cache.write_keys(cache, torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8), 0, arguments)
    assert keys.shape[2] == 4


def test_quantized_keys() -> None:
    class Lossless(cache_utils.QuantizedLayer):
        def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
            return tensor.clone()

        def _dequantize(self, q_tensor: Tensor) -> Tensor:
            return q_tensor

    layer, keys = Lossless(residual_length=2), torch.arange(16.0).view(1, 2, 1, 8)
    assert transformers_cache.quantized_keys(layer) is None
    layer.update(keys, keys)
    assert torch.equal(transformers_cache.quantized_keys(layer), keys)
    assert transformers_cache.quantized_keys(filled("dynamic", 3).layers[0]) is None
