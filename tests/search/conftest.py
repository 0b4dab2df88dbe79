"""Tiny rotary models to search on, and documents that random weights tell apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GlmConfig, GlmForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

ORIGINAL = 16
WORDS = 53
COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": ORIGINAL,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


def llama_config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**COMMON | {"num_key_value_heads": 1, "head_dim": 16} | changes)


def _build(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    if name == "llama":
        return LlamaForCausalLM(llama_config()).eval()
    if name == "glm":
        heads = {"num_key_value_heads": 1, "head_dim": 16}
        return GlmForCausalLM(GlmConfig(**COMMON | heads)).eval()
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**COMMON | {"rope_parameters": rope})).eval()


@pytest.fixture(scope="session")
def build() -> Callable[..., Any]:
    """Return what builds a tiny model: "llama", "glm" (interleaved, partial) or "neox" (partial)."""
    return _build


@pytest.fixture(scope="session")
def documents() -> torch.Tensor:
    """Return three documents of four times the original length, [3, 64]."""
    return torch.randint(1, WORDS, (3, 4 * ORIGINAL), generator=torch.Generator().manual_seed(1))
