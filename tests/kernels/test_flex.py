"""ALiBi under flex_attention: read from positions, with nothing of [Q, K]."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_posswap import patch_model
from hf_posswap.kernels.flex import Penalty
from hf_posswap.schemes.alibi import AlibiMechanism


def test_the_penalty_reads_as_the_dense_bias() -> None:
    mechanism = AlibiMechanism(heads=6, interpolation=2.0)
    query, key = torch.tensor([[4, 5, 9], [0, 1, 2]]), torch.arange(10).repeat(2, 1)
    lazy, dense = Penalty(mechanism.slopes, query, key), mechanism.bias(query, key)
    assert dense.shape == (2, 6, 3, 10)
    for place in torch.cartesian_prod(*map(torch.arange, dense.shape)):
        assert lazy[tuple(place)] == dense[tuple(place)]


ignored = pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
"""transformers passes the flag itself."""


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    patch_model(model, "alibi", max_length=512)
    return model


@ignored
@pytest.mark.slow
@torch.no_grad()
def test_flex_equals_sdpa_with_padding() -> None:
    model, ids = llama(), torch.randint(3, 67, (2, 160))
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
