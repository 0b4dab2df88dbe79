"""How the transformers that is installed finds attention implementations, and what its rotary functions compute."""

from __future__ import annotations

import importlib
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    UMT5Config,
    UMT5EncoderModel,
)
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


def test_rope_function() -> None:
    parameters = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, rope_parameters=parameters)
    found, factor = transformers_attention.rope_function("linear")(config, "cpu")
    torch.testing.assert_close(found, 100.0 ** -(torch.arange(0, 8, 2) / 8) / 4)
    assert factor == 1.0
    for name in ("dynamic", "yarn", "longrope", "llama3", "proportional"):
        assert callable(transformers_attention.rope_function(name))
    with pytest.raises(KeyError):
        transformers_attention.rope_function("no such type")


def test_runs_longrope_by_layer_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a model of two layer types that reads two texts beyond its original length."""
    lists = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8,
             "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}  # fmt: skip
    config = Gemma3TextConfig(
        hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8, vocab_size=30,
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], max_position_embeddings=32,
        rope_parameters={"full_attention": lists, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
    )  # fmt: skip
    model, runs = Gemma3ForCausalLM(config).eval(), True
    try:
        for _ in range(2):
            model(torch.arange(20)[None])
    except UnboundLocalError:
        runs = False
    assert transformers_attention.runs_longrope_by_layer_type() == runs
    for version, expected in (("5.20.2", False), ("5.21.0", True), ("5.21.0.dev0", True), ("6.0.0", True)):
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)  # which replaces itself
        assert transformers_attention.runs_longrope_by_layer_type() == expected


def test_of_any_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only in its block, and only in the thread that opened it."""
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.20.2")
    found: list[bool] = []
    with transformers_attention.of_any_release():
        thread = threading.Thread(target=lambda: found.append(transformers_attention.runs_longrope_by_layer_type()))
        thread.start()
        thread.join()
        found.append(transformers_attention.runs_longrope_by_layer_type())
    found.append(transformers_attention.runs_longrope_by_layer_type())
    assert found == [False, True, False]


@pytest.mark.parametrize(
    ("kind", "turned"),
    [
        ("llama", [-3, -4, 1, 2]),  # rotate_half, of halves
        ("glm", [-2, 1, -4, 3]),  # rotate_half, of neighbours
        ("llama4", [-2, 1, -4, 3]),  # apply_rotary_emb, complex
        ("gpt_oss", [-3, -4, 1, 2]),  # _apply_rotary_emb
    ],
)
def test_quarter_turn(kind: str, turned: list[int]) -> None:
    code = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    found = transformers_attention.quarter_turn(code, torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    assert found is not None
    assert found.flatten().tolist() == turned


def test_quarter_turn_of_code_without_rotation() -> None:
    from transformers.models.bert import modeling_bert

    assert transformers_attention.quarter_turn(modeling_bert, torch.zeros(1, 4)) is None


@pytest.mark.parametrize(("kind", "can"), [("llama", False), ("gpt_neox", True), ("glm", True), ("bert", False)])
def test_turns_part(kind: str, can: bool) -> None:
    code = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    assert transformers_attention.turns_part(code, 16, 8) == can
    assert transformers_attention.turns_part(code, 16, 16) == (kind != "bert")


def test_has_masked_keys() -> None:
    module: Any = torch.nn.Linear(2, 2)
    assert not transformers_attention.has_masked_keys(module, 1, 8)
    module.masked_key_indices = hidden = (torch.tensor([0]), torch.tensor([1]), torch.tensor([4]))  # rows, heads, keys
    assert transformers_attention.has_masked_keys(module, 1, 8)
    assert module.masked_key_indices is hidden
    assert not transformers_attention.has_masked_keys(module, 8, 8)  # a prefill
    assert module.masked_key_indices is None


def test_let_choose_flash(llama: Any) -> None:
    before = set(vars(llama))
    assert transformers_attention.let_choose_flash(llama, False)
    with pytest.raises(ValueError, match="Flash Attention"):
        llama.set_attn_implementation("flash_attention_2")
    assert not transformers_attention.let_choose_flash(llama, True)
    assert llama._supports_flash_attn
    assert set(vars(llama)) == before
    umt5 = UMT5EncoderModel(UMT5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    before = set(vars(umt5))
    assert not transformers_attention.let_choose_flash(umt5, False)  # nor is it in its class
    assert set(vars(umt5)) == before
