"""What the calls of the transformers that is installed carry: caches by type, arguments by signature."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Cache,
    ContinuousBatchingConfig,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    StaticCache,
    cache_utils,
)
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Model

from hf_posswap.compat import transformers_calls
from hf_posswap.compat import transformers_calls as calls
from hf_posswap.testing.tiny import tiny_model

CONFIG = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)


class Unknown:
    """Works like a cache, and is none of transformers'."""

    def update(self, *_: Any) -> None:
        """Take keys."""

    def get_seq_length(self) -> int:
        return 0


class Renamed(nn.Module):
    """A release that calls its cache otherwise."""

    def forward(self, states: Tensor, kv_store: Cache | None = None) -> Tensor:
        return states


class Hidden(nn.Module):
    """A class whose signature a wrapper hides."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def test_forward_parameters() -> None:
    names = list(calls.forward_parameters(GPT2Attention))
    assert names[0] == "hidden_states"
    assert set(names) & set(calls.CACHE_NAMES)
    assert names == list(inspect.signature(inspect.unwrap(GPT2Attention.forward)).parameters)[1:]


def test_names_arguments() -> None:
    assert calls.names_arguments(GPT2Attention)
    assert not calls.names_arguments(Hidden)


@pytest.mark.parametrize("make", [DynamicCache, lambda: StaticCache(CONFIG, 4)])
def test_is_cache(make: Any) -> None:
    assert calls.is_cache(make())
    assert calls.is_cache(EncoderDecoderCache(make(), make()))
    assert not calls.is_cache({"update": 1})
    assert not calls.is_paged_cache(make())


def test_is_paged_cache() -> None:
    paged = object.__new__(PagedAttentionCache)
    assert calls.is_paged_cache(paged)
    assert calls.is_cache(paged)


def test_tells_paged_positions() -> None:
    assert calls.tells_paged_positions() == (Version(transformers.__version__) >= Version("5.19"))


@pytest.mark.skipif(not calls.tells_paged_positions(), reason="transformers hands it on from 5.19 on")
def test_paged_keys() -> None:
    """What continuous batching hands on, by its own classes: two requests, the second one's first two tokens cached."""
    model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="sdpa")
    seen: list[tuple[list[int], int, list[int], int]] = []

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        cache = next(value for value in kwargs.values() if calls.is_paged_cache(value))
        ends, read = calls.paged_keys(cache, module.layer_idx, kwargs)
        seen.append((ends.tolist(), read, kwargs["cu_seq_lens_q"].tolist(), kwargs["position_ids"].shape[1]))

    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.register_forward_pre_hook(look, with_kwargs=True)
    settings = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1, pad_token_id=0)
    little = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    model.generate_batch([[1, 2, 3], [1, 2, 3, 4, 5]], settings, continuous_batching_config=little, warmup=False)
    (ends, *first), (_, *last) = seen[0], seen[-1]
    assert ends in ([0, 3, 8], [0, 5, 8])  # the second prompt may come first
    assert first == [0, ends, 8], "texts alone: keys are those of the new tokens"
    assert last == [10, [0, 1, 2], 2], "a step: each request's keys, and one query of each"
    assert seen[-1][0] == [0, ends[1] + 1, 10]


def test_cache_classes() -> None:
    assert calls.cache_classes() == (Cache, PagedAttentionCache)


def test_find_cache() -> None:
    cache, states = DynamicCache(), torch.zeros(1)
    assert calls.find_cache((states, None), {"any": cache}) == ("any", cache)
    assert calls.find_cache((states, cache), {"mask": None}) == (1, cache)
    assert calls.find_cache((states,), {"mask": None, "kwargs": {}}) is None


def test_find_cache_refuses_what_works_like_one() -> None:
    with pytest.raises(TypeError, match=r"Unknown works like a cache and is not a transformers\.Cache"):
        calls.find_cache((), {"any": Unknown()})


def test_cache_names() -> None:
    assert calls.cache_names(Renamed) == ("kv_store",)
    assert len(calls.cache_names(GPT2Model)) == 1
    assert calls.cache_names(Hidden) == ()


def test_cache_argument_is_taken_by_a_forward() -> None:
    model, ids = GPT2LMHeadModel(CONFIG).eval(), torch.tensor([[1, 2, 3]])
    whole = model(ids).logits
    first = model(ids[:, :2], use_cache=True)
    last = model(ids[:, 2:], **{calls.cache_argument(model): calls.cache_in(first)}).logits
    torch.testing.assert_close(last, whole[:, 2:])
    assert calls.cache_argument(Renamed()) == "kv_store"


def test_cache_in() -> None:
    cache = DynamicCache()
    assert calls.cache_in((torch.zeros(1), cache)) is cache
    assert calls.cache_in({"logits": torch.zeros(1)}) is None


def test_tensors_of_layers() -> None:
    cache = DynamicCache()
    keys = torch.ones(1, 2, 3, 4)
    cache.update(keys, keys + 1, 0)
    assert [tensor.sum().item() for tensor in calls.tensors_of_layers(cache.layers)] == [24, 48]
    if not hasattr(cache_utils, "LinearAttentionLayer"):  # older releases have caches of their own for such models
        return
    model = tiny_model("qwen3_next", meta=False)
    cache = calls.cache_in(model(torch.arange(8)[None], use_cache=True))
    states = [layer for layer in cache.layers if isinstance(layer, cache_utils.LinearAttentionLayer)]
    assert 0 < len(states) < len(cache.layers)
    assert all(len(calls.tensors_of_layers([layer])) == 2 for layer in cache.layers)


OF_LLAMA = LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
CACHES = {
    "dynamic": lambda: DynamicCache(),
    "static": lambda: StaticCache(OF_LLAMA, max_cache_len=12),
    "sliding": lambda: DynamicCache(config=LlamaConfig(**OF_LLAMA.to_diff_dict(), sliding_window=4)),
}


def filled(kind: str, tokens: int) -> Any:
    cache = CACHES[kind]()
    for _ in range(tokens):
        cache.update(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8), 0)
    return cache


@pytest.mark.parametrize("kind", CACHES)
def test_tokens_before(kind: str) -> None:
    assert [int(transformers_calls.tokens_before(filled(kind, tokens), 0)) for tokens in (0, 3, 7)] == [0, 3, 7]


@pytest.mark.parametrize(("kind", "seen"), [("dynamic", (9, 0)), ("static", (12, 0))])
def test_keys_of_call(kind: str, seen: tuple[int, int]) -> None:
    keys, first = transformers_calls.keys_of_call(filled(kind, 7), 2, 0)
    assert (keys, int(first)) == seen


def test_keys_of_call_are_those_that_update_returns() -> None:
    for kind in CACHES:
        for tokens in (0, 3, 7):
            cache = filled(kind, tokens)
            keys, _ = transformers_calls.keys_of_call(cache, 2, 0)
            returned, _ = cache.update(torch.ones(1, 2, 2, 8), torch.ones(1, 2, 2, 8), 0)
            assert returned.shape[2] == keys, (kind, tokens)


def test_cache_layer_class(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {**cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "ours": cache_utils.DynamicLayer}
    monkeypatch.setattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING", own)
    native = type("Typed", (cache_utils.DynamicLayer,), {"_layer_type": "ours"})
    assert own["ours"] is native  # transformers is told of each subclass with a type
    made = transformers_calls.cache_layer_class("Made", (native,), {"kept": 1})
    assert own["ours"] is native
    assert (made.__name__, made.__bases__, made.kept) == ("Made", (native,), 1)  # type: ignore[attr-defined]


def test_is_growing_layer() -> None:
    """Layers that hold all tokens, as `keys` and `values`, in their order: those that a cache begins with by itself."""
    assert transformers_calls.is_growing_layer(type(filled("dynamic", 3).layers[0]))
    for other in (cache_utils.StaticLayer, cache_utils.DynamicSlidingWindowLayer, cache_utils.QuantizedLayer):
        assert not transformers_calls.is_growing_layer(other)
    assert filled("dynamic", 3).layers[0].keys.shape[-2] == 3


def test_is_growing_cache() -> None:
    """Caches whose layers say each by itself how many tokens they hold, before and after they took some."""
    assert transformers_calls.is_growing_cache(filled("dynamic", 3))
    others = (EncoderDecoderCache(DynamicCache(), DynamicCache()), DynamicCache(offloading=True), filled("static", 3))
    assert not any(map(transformers_calls.is_growing_cache, others))
    cache = filled("dynamic", 3)
    for number, layer in enumerate(cache.layers):
        assert cache.get_seq_length(number) == cache.get_query_offset(number) == layer.keys.shape[-2] == 3
        assert cache.get_mask_sizes(2, number) == (5, 0)


def test_self_attention_cache() -> None:
    own, cross = DynamicCache(), DynamicCache()
    assert transformers_calls.self_attention_cache(EncoderDecoderCache(own, cross)) is own
    assert transformers_calls.self_attention_cache(own) is own


@pytest.mark.parametrize("kind", CACHES)
def test_update_of_a_cache_view(kind: str) -> None:
    """A view is of the cache's class, and what is written into it stands in the cache, its keys changed."""
    transformers_calls.prepare_views()
    cache, plain = filled(kind, 3), filled(kind, 3)
    view = transformers_calls.cache_view(cache, lambda key: 2 * key)
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
    view = transformers_calls.cache_view(cache, lambda key: 2 * key)
    view.self_attention_cache.update(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8), 0)
    assert cache.self_attention_cache.layers[0].keys[0, 0, :, 0].tolist() == [1, 1, 1, 2]
    assert view.cross_attention_cache is cache.cross_attention_cache
    assert view.is_updated is cache.is_updated


def test_prepare_views() -> None:
    transformers_calls.prepare_views()
    assert isinstance(transformers_calls.cache_view(DynamicCache(), lambda key: key), DynamicCache)


def test_write_keys() -> None:
    cache, arguments = filled("dynamic", 3), {}  # type: ignore[var-annotated]
    keys, _ = transformers_calls.write_keys(cache, torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8), 0, arguments)
    assert keys.shape[2] == 4


def test_quantized_keys() -> None:
    class Lossless(cache_utils.QuantizedLayer):
        def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
            return tensor.clone()

        def _dequantize(self, q_tensor: Tensor) -> Tensor:
            return q_tensor

    layer, keys = Lossless(residual_length=2), torch.arange(16.0).view(1, 2, 1, 8)
    assert transformers_calls.quantized_keys(layer) is None
    layer.update(keys, keys)
    assert torch.equal(transformers_calls.quantized_keys(layer), keys)
    assert transformers_calls.quantized_keys(filled("dynamic", 3).layers[0]) is None
