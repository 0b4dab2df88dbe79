"""Tiny random models to train on: two layers, 32 wide, a byte-level vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 300
WINDOW = 64


def tiny(kind: str, attention: str = "sdpa", **options: Any) -> Any:
    """Return a random model of `kind`, in eval mode, the same every time."""
    torch.manual_seed(3)
    shape = {"vocab_size": VOCABULARY, "initializer_range": 0.2, "attn_implementation": attention}
    if kind == "gpt2":
        sizes = {"n_positions": WINDOW, "n_embd": 32, "n_layer": 2, "n_head": 4}
        return GPT2LMHeadModel(GPT2Config(**shape | sizes | options)).eval()
    if kind == "gptj":
        sizes = {"n_positions": WINDOW, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}
        return GPTJForCausalLM(GPTJConfig(**shape | {"attn_implementation": "eager"} | sizes | options)).eval()
    if kind == "bloom":
        sizes = {"hidden_size": 32, "n_layer": 2, "n_head": 4}
        return BloomForCausalLM(BloomConfig(**shape | {"attn_implementation": "eager"} | sizes | options)).eval()
    if kind == "t5":
        sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4}
        return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **sizes | options)).eval()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"max_position_embeddings": WINDOW}
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape | sizes | {"num_key_value_heads": 2} | options)).eval()
    return BertForMaskedLM(BertConfig(**shape | sizes | options)).eval()
