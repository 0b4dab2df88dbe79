"""The small shapes that the scheme tests share."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig

from hf_posswap.geometry import Geometry


def geometry(**changes: Any) -> Geometry:
    """Return the geometry of a small causal model without a rotary of its own, with `changes`."""
    fields: dict[str, Any] = {
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 16,
        "num_layers": 2,
        "original_length": 128,
        "causal": True,
    }
    return Geometry(**fields | changes)


def llama(**changes: Any) -> LlamaConfig:
    """Return the config of a small Llama whose weights are large enough for positions to show, with `changes`."""
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 53,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    return LlamaConfig(**fields | changes)


def image_geometry(**changes: Any) -> Geometry:
    """Return the geometry of a small model that sees images of 4 x 4 patches after a class token, with `changes`."""
    fields: dict[str, Any] = {
        "original_length": 17,
        "causal": False,
        "image_size": (32, 32),
        "patch_size": (8, 8),
        "prefix_tokens": 1,
    }
    return geometry(**fields | changes)
