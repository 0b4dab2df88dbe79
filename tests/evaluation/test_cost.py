"""Bytes are those of the cache's formula; times are there, and nothing more is asked of them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_posswap import patch_model
from hf_posswap.errors import DataError
from hf_posswap.evaluation.cost import costs_are_possible, forward_operations, measure_cost


@pytest.mark.parametrize("prefill", [None, 7])
@pytest.mark.parametrize("scheme", [None, "alibi", "yarn"])
def test_the_cache_is_layers_heads_dims_and_tokens(scheme: str | None, prefill: int | None) -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    if scheme is not None:
        patch_model(model, scheme, max_length=256)
    cost = measure_cost(model, torch.randint(0, 50, (1, 48)), prefill=prefill)
    assert cost.cache_bytes == 2 * 3 * 2 * 8 * 48 * 4
    assert (cost.length, cost.peak_bytes) == (48, None)
    assert cost.prefill_seconds > 0
    assert cost.decode_seconds > 0
    assert cost.tokens_per_second == pytest.approx(48 / cost.prefill_seconds)


def test_what_has_no_cost_is_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=1, n_head=2)).eval()
    with pytest.raises(DataError, match=r"one text \[1, L\], L >= 2, and at least 1 new token, got \(2, 9\), 8"):
        measure_cost(model, torch.zeros(2, 9, dtype=torch.long))
    assert costs_are_possible(model, 24)
    assert not costs_are_possible(model, 25)


@pytest.mark.parametrize("tied", [False, True])
def test_operations_are_those_that_torch_counts(tied: bool) -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=tied, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    norms = (2 * 3 + 1) * 32  # whose products torch does not count
    for length in (16, 64):
        with FlopCounterMode(display=False) as counted, torch.no_grad():
            model(torch.zeros(1, length, dtype=torch.long))
        masked = 2 * 3 * 32 * length**2  # eager attention computes what is masked too
        by_module = counted.get_flop_counts()
        angles = sum(by_module.get("LlamaForCausalLM.model.rotary_emb", {}).values())  # products in older transformers
        products = counted.get_total_flops() - masked - angles
        assert forward_operations(model, length) == products + 2 * length * norms
