"""Models of other classes with the same weights: what a swapped model must equal, computed by transformers alone."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from tests.contract.models import LENGTH, PADDING, VOCABULARY

HEADS, LAYERS = 4, 2
_TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": PADDING, "bos_token_id": 2, "eos_token_id": None}
_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 4 * LENGTH,
}


def by_head(stacked: Tensor) -> Tensor:
    """Reorder rows [q of all heads, k of all, v of all] as GPT-NeoX has them: q, k, v of each head in turn."""
    return stacked.view(3, HEADS, -1, *stacked.shape[1:]).transpose(0, 1).reshape(stacked.shape)


def _loaded(class_name: str, config: Any, weights: dict[str, Tensor]) -> Any:
    """Return a model of `class_name` with exactly these weights; a missing or left-over name is an error."""
    model = getattr(transformers, class_name)(config)
    model.load_state_dict(weights, strict=True)
    return model.eval()


def neox_of_gpt2(model: Any) -> Any:
    """Return the GPT-NeoX that computes what GPT-2 with RoPE must."""
    old = model.state_dict()
    new = {
        "gpt_neox.embed_in.weight": old["transformer.wte.weight"],
        "lm_head.weight": old["lm_head.weight"],
        "gpt_neox.final_layer_norm.weight": old["transformer.ln_f.weight"],
        "gpt_neox.final_layer_norm.bias": old["transformer.ln_f.bias"],
    }
    parts = {
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "attn.c_proj": "attention.dense",
        "mlp.c_fc": "mlp.dense_h_to_4h",
        "mlp.c_proj": "mlp.dense_4h_to_h",
    }
    for i in range(LAYERS):
        here, there = f"transformer.h.{i}", f"gpt_neox.layers.{i}"
        for part, name in parts.items():
            weight = old[f"{here}.{part}.weight"]
            new[f"{there}.{name}.weight"] = weight.T if weight.dim() == 2 else weight  # Conv1D is transposed
            new[f"{there}.{name}.bias"] = old[f"{here}.{part}.bias"]
        new[f"{there}.attention.query_key_value.weight"] = by_head(old[f"{here}.attn.c_attn.weight"].T)
        new[f"{there}.attention.query_key_value.bias"] = by_head(old[f"{here}.attn.c_attn.bias"])
    return _loaded("GPTNeoXForCausalLM", _neox_config(256, "gelu_new"), new)


def neox_of_opt(model: Any) -> Any:
    """Return the GPT-NeoX that computes what OPT with RoPE must."""
    old = model.state_dict()
    new = {
        "gpt_neox.embed_in.weight": old["model.decoder.embed_tokens.weight"],
        "lm_head.weight": old["lm_head.weight"],
        "gpt_neox.final_layer_norm.weight": old["model.decoder.final_layer_norm.weight"],
        "gpt_neox.final_layer_norm.bias": old["model.decoder.final_layer_norm.bias"],
    }
    parts = {
        "self_attn_layer_norm": "input_layernorm",
        "final_layer_norm": "post_attention_layernorm",
        "self_attn.out_proj": "attention.dense",
        "fc1": "mlp.dense_h_to_4h",
        "fc2": "mlp.dense_4h_to_h",
    }
    for i in range(LAYERS):
        here, there = f"model.decoder.layers.{i}", f"gpt_neox.layers.{i}"
        for kind in ("weight", "bias"):
            for part, name in parts.items():
                new[f"{there}.{name}.{kind}"] = old[f"{here}.{part}.{kind}"]
            stacked = [old[f"{here}.self_attn.{p}_proj.{kind}"] for p in "qkv"]
            new[f"{there}.attention.query_key_value.{kind}"] = by_head(torch.cat(stacked))
    return _loaded("GPTNeoXForCausalLM", _neox_config(96, "relu"), new)


def _neox_config(inner: int, activation: str) -> Any:
    return transformers.GPTNeoXConfig(
        **_TOKENS,
        **_SHAPE,
        intermediate_size=inner,
        hidden_act=activation,
        use_parallel_residual=False,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    )


def jina_of(model: Any) -> Any:
    """Return the JinaEmbeddingsV3 that computes what BERT or RoBERTa with RoPE must."""
    old, prefix = model.state_dict(), model.base_model_prefix
    names = {f"{prefix}.embeddings.{n}": f"roberta.embeddings.{n}" for n in ("word_embeddings", "LayerNorm")}
    names[f"{prefix}.embeddings.token_type_embeddings"] = "roberta.embeddings.token_type_embeddings"
    head = {"dense": "transform.dense", "layer_norm": "transform.LayerNorm", "decoder": "decoder"}
    for name, bert in head.items():
        names[f"cls.predictions.{bert}" if prefix == "bert" else f"lm_head.{name}"] = f"lm_head.{name}"
    parts = {f"attention.self.{n}": f"self_attn.{n[0]}_proj" for n in ("query", "key", "value")} | {
        "attention.output.dense": "self_attn.o_proj",
        "attention.output.LayerNorm": "post_attention_layernorm",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
        "output.LayerNorm": "post_mlp_layernorm",
    }
    for i in range(LAYERS):
        names |= {f"{prefix}.encoder.layer.{i}.{a}": f"roberta.layers.{i}.{b}" for a, b in parts.items()}
    new = {
        f"{there}.{kind}": old[f"{here}.{kind}"]
        for here, there in names.items()
        for kind in ("weight", "bias")
        if f"{here}.{kind}" in old
    }
    new["lm_head.bias"] = new["lm_head.decoder.bias"]
    config = transformers.JinaEmbeddingsV3Config(
        **_TOKENS,
        **_SHAPE,
        intermediate_size=96,
        type_vocab_size=model.config.type_vocab_size,
        layer_norm_eps=model.config.layer_norm_eps,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return _loaded("JinaEmbeddingsV3ForMaskedLM", config, new)


def roformer_of(model: Any) -> Any:
    """Return the RoFormer that computes what BERT with interleaved RoPE must."""
    config = transformers.RoFormerConfig(
        **_TOKENS,
        **_SHAPE,
        intermediate_size=96,
        embedding_size=64,
        type_vocab_size=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    new = {
        name.replace("bert.", "roformer.", 1) if name.startswith("bert.") else name: tensor
        for name, tensor in model.state_dict().items()
        if "position_embeddings" not in name
    }
    table = transformers.RoFormerForMaskedLM(config).state_dict()
    new["roformer.encoder.embed_positions.weight"] = table["roformer.encoder.embed_positions.weight"]
    return _loaded("RoFormerForMaskedLM", config, new)


def smollm3_of(model: Any) -> Any:
    """Return the SmolLM3 without any rotary layer that computes what Llama without positions must."""
    config = transformers.SmolLM3Config(
        **_TOKENS,
        **_SHAPE,
        intermediate_size=96,
        num_key_value_heads=2,
        no_rope_layers=[0] * LAYERS,
        rms_norm_eps=model.config.rms_norm_eps,
        tie_word_embeddings=False,
        use_sliding_window=False,
    )
    return _loaded("SmolLM3ForCausalLM", config, model.state_dict())
