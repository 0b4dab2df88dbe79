"""What the calls of the transformers that is installed carry: caches by type, arguments by signature."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, GPT2Config, GPT2LMHeadModel, StaticCache
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Model

from hf_posswap.compat import transformers_calls as calls

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


def test_cache_classes() -> None:
    assert calls.cache_classes() == (Cache, PagedAttentionCache)


def test_find_cache() -> None:
    cache, states = DynamicCache(), torch.zeros(1)
    assert calls.find_cache((states, None), {"any": cache}) == ("any", cache)
    assert calls.find_cache((states, cache), {"mask": None}) == (1, cache)
    assert calls.find_cache((states,), {"mask": None, "kwargs": {}}) is None


def test_find_cache_refuses_what_works_like_one() -> None:
    with pytest.raises(TypeError, match=r"Unknown works like a cache and is no transformers\.Cache"):
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
