"""The models that the benchmarks run, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_posswap import patch_model


def gpt2(smoke: bool, *, scheme: str | None = None, positions: int = 4096, **options: Any) -> Any:
    """Return a GPT-2 of size "small", its position table replaced by `scheme` if given."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"n_embd": 48, "n_layer": 2, "n_head": 4} if smoke else {}
    config = GPT2Config(
        n_positions=positions, vocab_size=512, bos_token_id=0, eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0,
        resid_pdrop=0.0, **shape,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    if scheme is not None:
        patch_model(model, scheme, **options)
    return model


def gpt_neox(smoke: bool, positions: int = 4096) -> Any:
    """Return a GPT-NeoX of the size of GPT-2 small: the same work with native rotary positions."""
    torch.manual_seed(0)
    width, layers, heads = (48, 2, 4) if smoke else (768, 12, 12)
    config = GPTNeoXConfig(
        vocab_size=512, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width, max_position_embeddings=positions, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPTNeoXForCausalLM(config).eval()


def llama(smoke: bool, vocabulary: int = 32_000) -> Any:
    """Return a Llama of 11 million parameters with a large vocabulary."""
    torch.manual_seed(0)
    width, layers = (32, 1) if smoke else (256, 4)
    config = LlamaConfig(
        vocab_size=64 if smoke else vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=3 * width, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def smollm2(smoke: bool, *, scheme: str | None = None, positions: int = 32768, layers: int = 30) -> Any:
    """Return a Llama of the shape of SmolLM2-135M, its rotation replaced by `scheme` if given, for `positions`."""
    torch.manual_seed(0)
    width, layers, vocabulary = (36, 1, 512) if smoke else (576, layers, 49152)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, intermediate_size=width * 8 // 3, max_position_embeddings=8192, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    if scheme is not None:
        patch_model(model, scheme, max_length=positions)
    return model
