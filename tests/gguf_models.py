"""Tiny models of the architectures that GGUF files are written of, beside those of tests/contract."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from tests.contract.models import LENGTH, VOCABULARY, build

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "bos_token_id": 2,
    "eos_token_id": None, "pad_token_id": 1,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
FIELDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"head_dim": 32, "num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 32},
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {"original_max_position_embeddings": LENGTH}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        _EXPERTS | {"shared_expert_intermediate_size": 64},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 32}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", {"num_hidden_layers": 5, "head_dim": 16}),
}
"""By name, the class of the model and of its config, and fields of the config."""


def letters() -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level BPE of few tokens, which a tiny model has room for."""
    words = {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}
    tokenizer = Tokenizer(BPE(words, [("a", "b")]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = Decoder()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def tiny(name: str, **changes: Any) -> Any:
    """Return a tiny model with random weights, norms and biases; those of tests/contract by their names, too."""
    if name not in FIELDS:
        return build(name, **changes)
    model_class, config_class, fields = FIELDS[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**_SIZES | fields | changes)).eval()
    for parameter_name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 and "gemma" not in name else 0.0, std=0.2)
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    return model
