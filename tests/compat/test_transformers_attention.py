"""How transformers finds attention implementations, of the transformers that is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_posswap.compat import transformers_attention

KNOWN_BY_ANY_NAME = ALL_ATTENTION_FUNCTIONS
IDS = torch.arange(1, 9)[None]
SIZES: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 11, "n_positions": 16}


@pytest.fixture
def llama() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=11,
            initializer_range=0.2,
        )
    ).eval()  # fmt: skip


def test_attention_implementation(llama: Any) -> None:
    for name in ("eager", "sdpa"):
        llama.set_attn_implementation(name)
        assert transformers_attention.attention_implementation(llama.config) == name


def test_attention_function() -> None:
    def eager() -> None: ...

    assert transformers_attention.attention_function("eager", eager) is eager
    assert transformers_attention.attention_function("sdpa", eager).__name__ == "sdpa_attention_forward"
    with pytest.raises(KeyError, match="no_such_implementation"):
        transformers_attention.attention_function("no_such_implementation", eager)


def test_register_attention_function(llama: Any) -> None:
    masks: list[Any] = []

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        masks.append(mask)
        return transformers_attention.attention_function("sdpa", None)(module, query, key, value, mask, **kwargs)

    padded = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    expected = llama(IDS, attention_mask=padded).logits
    transformers_attention.register_attention_function("of_a_test", attend)
    llama.set_attn_implementation("of_a_test")
    assert torch.equal(llama(IDS, attention_mask=padded).logits, expected)
    assert [mask.shape[-2:] for mask in masks] == [(8, 8)]  # without its mask function it would be given None


def test_implementation_is_what_attention_modules_read(llama: Any) -> None:
    class View:
        """Says of one attribute alone something else than the model's config."""

        def __getattr__(self, name: str) -> Any:
            return "eager" if name == transformers_attention.IMPLEMENTATION else getattr(llama.config, name)

    attention = llama.model.layers[0].self_attn
    assert attention(torch.ones(1, 2, 16), (torch.ones(1, 2, 8), torch.zeros(1, 2, 8)), None)[1] is None
    attention.config = View()
    weights = attention(torch.ones(1, 2, 16), (torch.ones(1, 2, 8), torch.zeros(1, 2, 8)), None)[1]
    assert weights.shape == (1, 2, 2, 2)  # eager code hands them out, sdpa does not


def test_attends_by_interface() -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention
    from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

    assert transformers_attention.attends_by_interface(LlamaAttention)
    assert not transformers_attention.attends_by_interface(XLNetRelativeAttention)


def test_attends_by_interface_through_a_method_of_its_own() -> None:
    from transformers import AttentionInterface

    class Indirect(torch.nn.Module):
        def forward(self, states: Tensor) -> Any:
            return self.attend(states)

        def attend(self, states: Tensor) -> Any:
            return KNOWN_BY_ANY_NAME.get("sdpa")

    class Closed(torch.nn.Module):
        def forward(self, states: Tensor) -> Any:
            return states

    assert isinstance(KNOWN_BY_ANY_NAME, AttentionInterface)
    assert transformers_attention.attends_by_interface(Indirect)
    assert not transformers_attention.attends_by_interface(Closed)


def test_eager_function(llama: Any) -> None:
    attention = llama.model.layers[0].self_attn
    found: Any = transformers_attention.eager_function(type(attention))
    query = torch.randn(1, 2, 4, 8)
    sdpa = transformers_attention.attention_function("sdpa", None)
    out = found(attention, query, query, query, None, scaling=0.5)[0]
    expected = sdpa(attention, query, query, query, None, scaling=0.5, is_causal=False)[0]
    torch.testing.assert_close(out, expected)
    assert transformers_attention.eager_function(torch.nn.Linear) is None


def test_upcast_attention() -> None:
    model = GPT2LMHeadModel(GPT2Config(**SIZES, reorder_and_upcast_attn=True, attn_implementation="eager")).eval()
    query = torch.randn(1, 2, 4, 4)
    out, weights = transformers_attention.upcast_attention(model.transformer.h[0].attn, query, query, query, None)
    expected = torch.softmax(query @ query.transpose(-1, -2) / 2, dim=-1)
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(out, (expected @ query).transpose(1, 2))


def test_can_choose_attention(llama: Any) -> None:
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    assert transformers_attention.can_choose_attention(llama)
    model = GPTNeoForCausalLM(GPTNeoConfig(hidden_size=8, num_layers=1, num_heads=2, attention_types=[[["global"], 1]]))
    interface = transformers_attention.attends_by_interface(type(model.transformer.h[0].attn.attention))
    assert transformers_attention.can_choose_attention(model) == interface


def test_supports_sdpa(llama: Any) -> None:
    from transformers import XLNetConfig, XLNetModel

    assert transformers_attention.supports_sdpa(llama)
    assert not transformers_attention.supports_sdpa(XLNetModel(XLNetConfig(d_model=8, n_layer=1, n_head=2, d_inner=8)))


@pytest.fixture
def closed() -> Any:
    """Return a model whose class lets nobody choose."""
    from transformers import XLNetConfig, XLNetModel

    return XLNetModel(XLNetConfig(d_model=8, n_layer=1, n_head=2, d_inner=8, attn_implementation="eager"))


def test_let_choose_attention(closed: Any) -> None:
    assert not transformers_attention.can_choose_attention(closed)
    transformers_attention.let_choose_attention(closed, sdpa=False)
    with pytest.raises(ValueError, match="does not support"):
        closed.set_attn_implementation("sdpa")
    transformers_attention.let_choose_attention(closed, sdpa=True)
    closed.set_attn_implementation("sdpa")
    assert transformers_attention.attention_implementation(closed.config) == "sdpa"
    for refused in ("flash_attention_2", "flex_attention"):
        with pytest.raises((ValueError, ImportError)):
            closed.set_attn_implementation(refused)
    assert not transformers_attention.can_choose_attention(type(closed))


def test_let_class_choose_attention(closed: Any) -> None:
    before = set(vars(closed))
    transformers_attention.let_choose_attention(closed, sdpa=True)
    transformers_attention.let_class_choose_attention(closed)
    assert set(vars(closed)) == before
    assert not transformers_attention.can_choose_attention(closed)
    transformers_attention.let_class_choose_attention(closed)  # nothing is left to take back
