"""ALiBi under flex_attention: read from positions, with nothing of [Q, K]."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_posswap import patch_model
from hf_posswap.geometry import Geometry
from hf_posswap.patching.backends import flex_bias
from hf_posswap.patching.positions import Span
from hf_posswap.schemes import Kerple, T5Bias
from hf_posswap.schemes.alibi import AlibiMechanism


def mechanism_of(name: str, causal: bool) -> Any:
    geometry = Geometry(48, 6, 6, 8, 2, 64, causal=causal)
    schemes: dict[str, Any] = {"t5": T5Bias(init_std=1.0, max_distance=9, num_buckets=8), "kerple": Kerple()}
    if name == "alibi":
        return AlibiMechanism(heads=6, interpolation=2.0)
    return schemes[name].resolve(geometry, None).mechanism(geometry)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["alibi", "t5", "kerple"])
@torch.no_grad()
def test_it_reads_as_the_dense_bias(name: str, causal: bool) -> None:
    mechanism = mechanism_of(name, causal)
    span = Span(torch.tensor([[4, 5, 9], [0, 1, 30]]), 7, 10, 0, torch.tensor([[0], [3]]), fresh=False)
    read, dense = flex_bias(mechanism, span, 2), mechanism.bias(span.query, span.key)
    assert dense.shape == (2, 6, 3, 10)
    for place in torch.cartesian_prod(*map(torch.arange, dense.shape)):
        assert read[tuple(place)] == dense[tuple(place)]


def test_what_is_learned_is_given_as_a_tensor() -> None:
    span = Span(torch.arange(4)[None], 0, 4, 0, 0, fresh=True)
    mechanism = mechanism_of("t5", True)
    assert flex_bias(mechanism, span, 1) is None
    assert flex_bias(mechanism.requires_grad_(False), span, 1) is not None


ignored = pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
"""transformers passes the flag itself."""


def llama(scheme: str = "alibi") -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    patch_model(model, scheme, max_length=512, **({"init_std": 1.0} if scheme == "t5" else {}))
    return model


@ignored
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["alibi", "t5"])
@torch.no_grad()
def test_flex_equals_sdpa_with_padding(scheme: str) -> None:
    model, ids = llama(scheme), torch.randint(3, 67, (2, 160))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    expected = model(ids, attention_mask=mask).logits
    model.set_attn_implementation("flex_attention")
    found = model(ids, attention_mask=mask).logits
    assert (found - expected)[mask.bool()].abs().max() < 5e-5


@ignored
@pytest.mark.gpu
def test_flex_on_a_gpu_gives_gradients_and_needs_memory_of_order_length() -> None:
    model, ids = llama().to("cuda"), torch.randint(3, 67, (1, 4096), device="cuda")
    model(ids[:, :512], labels=ids[:, :512]).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.set_attn_implementation("flex_attention")
    model(ids[:, :512], labels=ids[:, :512]).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-3, rtol=1e-2)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        model(ids, use_cache=False)
    dense = 4 * 4096**2 * 4  # [H, Q, K] in float32
    assert torch.cuda.max_memory_allocated() - before < dense / 4
