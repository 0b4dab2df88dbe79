"""Tiny models of every class that transformers' Auto maps name for language models: for the census, and for tests.

A config is shrunk field by field, to the sizes in `SMALL`, with further settings of some model types in `OWN`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_posswap.compat.torch_dispatch import PrivateRandomness
from hf_posswap.compat.transformers_loading import class_names
from hf_posswap.compat.transformers_models import building_on_meta
from hf_posswap.errors import UnknownNameError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


TINY_LENGTH = 32
"""Original length of the tiny models in tokens, if their class supports it."""
TINY_VOCABULARY = 97

SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size", "word_embed_proj_dim",
         "pronunciation_embed_dim", "shape_embed_dim", "input_embedding_size", "output_embedding_size",
         "entity_emb_size", "d_latents", "audio_hidden_size"), 64,
    ),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "hidden_dim", "dff",
         "dim_ff", "ffn_hidden_size", "dense_intermediate_size", "intermediate_size_mlp"), 48,
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
         "expert_ffn_hidden_size", "shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"), 16,
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
         "num_decoder_layers", "num_encoder_layers", "depth"), 4,
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
         "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4,
    ),
    **dict.fromkeys(("num_key_value_heads", "index_n_heads"), 2),
    **dict.fromkeys(
        ("head_dim", "global_head_dim", "d_kv", "kv_channels", "v_head_dim", "index_head_dim", "attention_head_size"),
        16,
    ),
    **dict.fromkeys(
        ("qk_rope_head_dim", "qk_nope_head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim",
         "mamba_head_dim", "ssm_state_size", "state_size", "mamba_d_state", "index_topk"), 8,
    ),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "router_hidden_size", "hc_lowrank"), 16),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "linear_chunk_size"), 16),
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "num_filters": 2,
    "blank_token_id": 3,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_num_heads": 4,
    "mamba_n_heads": 8, "mamba_num_heads": 8, "rotary_dim": 4,
    **dict.fromkeys(
        ("src_vocab_size", "tgt_vocab_size", "shape_vocab_size", "pronunciation_vocab_size", "entity_vocab_size",
         "encoder_hash_byte_group_vocab", "vocab_size_per_layer_input", "unpadded_vocab_size"), TINY_VOCABULARY,
    ),
    "hidden_size_per_layer_input": 8, "downsample_hidden_size": 16, "ext_pw_out_channel": 32, "nemo_conv_channels": 32,
    "max_encoder_position_embeddings": TINY_LENGTH, "max_decoder_position_embeddings": TINY_LENGTH,
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num"), 4,
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    "n_group": 1, "topk_group": 1,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions"), TINY_LENGTH),
    "original_max_position_embeddings": TINY_LENGTH,
    **dict.fromkeys(("sliding_window", "attention_window_size", "local_attention", "attention_chunk_size"), 8),
    "vocab_size": TINY_VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    **dict.fromkeys(
        ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout",
         "hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout", "dropout_rate",
         "encoder_layerdrop", "decoder_layerdrop", "layerdrop", "embedding_dropout", "resid_dropout",
         "embed_dropout", "mlp_dropout"), 0.0,
    ),
}  # fmt: skip
"""Sizes by field name, for every config class with such a field."""

_LINEAR = ["linear_attention", "full_attention"] * 2
_MAMBA = ["linear_attention", "hybrid"] * 2
_LOCAL = ["sliding_attention", "full_attention"] * 2
_AXIAL = {"axial_pos_shape": [4, 8], "axial_pos_embds_dim": [16, 48], "attn_layers": ["local", "lsh"] * 2,
          "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8, "num_buckets": 4}  # fmt: skip
_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
            "indexer_compress_ratio": 2}  # fmt: skip
_NO_LAYER_INPUT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}

OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    **dict.fromkeys(("big_bird", "bigbird_pegasus"), {"attention_type": "original_full"}),
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 64},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
    },
    "deepseek_v4": {"head_dim": 32, "index_head_dim": 32},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "lara_mini": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "sliding_attention", *_LOCAL[:2]]},
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": _LOCAL, "laurel_rank": 4},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **_NO_LAYER_INPUT}},
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text"}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"position_embedding_type": "rope", "layer_types": _LINEAR},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": _LINEAR},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8},
    "mimo_v2_flash": {"head_dim": 24},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "qwen4_exp_text": _INDEXER,
    "led": {"attention_window": 4},
    **dict.fromkeys(("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), {"layer_types": _LINEAR}),
    "reformer": _AXIAL,
    "xlnet": {"d_inner": 48},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": _MAMBA},
    "zamba2": {"layers_block_type": _MAMBA, "use_mem_rope": True},
    "zaya": {"num_experts_per_tok": 1},
}
"""Further settings by model type."""


__all__ = ["TINY_LENGTH", "TINY_VOCABULARY", "language_models", "tiny_config", "tiny_model"]


def language_models() -> dict[str, tuple[str, ...]]:
    """Return the names of the classes for causal, masked and seq2seq language modelling, each with its model types."""
    types_by_class: dict[str, list[str]] = {}
    for task in ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM"):
        for model_type, name in class_names(task).items():
            types = types_by_class.setdefault(name, [])
            if model_type not in types:
                types.append(model_type)
    return {name: tuple(types) for name, types in types_by_class.items()}


def tiny_config(cls: type, **changes: object) -> PreTrainedConfig:
    """Return a shrunk config of the config class `cls`, including its nested configs.

    Args:
        cls: a config class of transformers.
        changes: fields to override; for a nested config, a dict of its fields.
    """
    model_type: str = cls.model_type  # type: ignore[attr-defined]
    overrides = OWN.get(model_type, {}) | changes
    names = {field.name for field in dataclasses.fields(cls)}
    values = {name: value for name, value in SMALL.items() if name in names}
    if "qk_rope_head_dim" in names or model_type == "esmc":  # as many keys as queries
        values["num_key_value_heads"] = values["num_attention_heads"]
    inner = getattr(cls, "sub_configs", None) or {}
    if inner:
        typed = {name: value for name, value in overrides.items() if name not in inner or "model_type" in value}
        whole = cls(**typed)  # determines the classes of the nested configs
        for name in inner:
            inner_config = getattr(whole, name, None)
            if inner_config is not None:
                fields = {key: value for key, value in overrides.get(name, {}).items() if key != "model_type"}
                values[name] = tiny_config(type(inner_config), **fields)
    values |= {name: value for name, value in overrides.items() if name not in inner}
    return cls(**values | _all_layer_types(cls(**values)))


def _all_layer_types(config: PreTrainedConfig) -> dict[str, list[str]]:
    """Return `layer_types` that include each layer type with rope parameters, if the config's few layers lack one."""
    types = getattr(config, "layer_types", None) or []
    parameters = getattr(config, "rope_parameters", None) or {}
    rotating = [name for name, value in parameters.items() if isinstance(value, dict)]
    if not set(rotating) & set(types) or set(rotating) <= set(types):
        return {}
    return {"layer_types": [rotating[i % len(rotating)] for i in range(len(types))]}


def tiny_model(
    kind: str | type[PreTrainedModel], *, meta: bool = True, seed: int = 0, **changes: object
) -> PreTrainedModel:
    """Return a tiny model of a class, or of the first known class of a model type, in eval mode.

    Args:
        kind: a model class, its name, or a model type.
        meta: whether it is on the meta device, where it is almost free and cannot run; otherwise its weights are
            random, determined by `seed`, and large enough for positions to matter.
        seed: random seed of the weights.
        changes: fields of the config to override.

    Raises:
        UnknownNameError: no class and no model type of that name.

    Example:
        >>> model = tiny_model("llama")
        >>> type(model).__name__, model.device.type
        ('LlamaForCausalLM', 'meta')
    """
    cls = _model_class(kind)
    if _decodes(cls):
        changes = {"is_decoder": True} | changes
    config = tiny_config(_config_class(cls, kind), **changes)
    if meta:
        with building_on_meta():
            skeleton = cls(config).eval()
        return skeleton.to("meta")  # some classes create parameters on the CPU on any device
    with PrivateRandomness(seed):
        model = cls(config)
        with torch.no_grad():  # random values for all trainable weights: one of 0 or 1 would hide errors
            for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
                if parameter.ndim > 1:
                    nn.init.normal_(parameter, std=0.2)
                else:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def _model_class(kind: str | type[PreTrainedModel]) -> type[PreTrainedModel]:
    import transformers

    if not isinstance(kind, str):
        return kind
    classes = language_models()
    name = kind if kind in classes else next((name for name, types in classes.items() if kind in types), None)
    if name is None and isinstance(other := getattr(transformers, kind, None), type):
        return other  # of images, for one
    if name is None:
        raise UnknownNameError("model", kind, [*classes, *(t for types in classes.values() for t in types)])
    return getattr(transformers, name)


def _config_class(cls: type[PreTrainedModel], kind: Any) -> type:
    """Return the config class for `cls`: its own, or that of another model type that the Auto classes map to it."""
    from transformers import CONFIG_MAPPING

    native: Any = cls.config_class
    requested: Any = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else native
    return (
        native if requested.sub_configs else requested
    )  # a whole of several modalities, of which `cls` is the text part


def _decodes(cls: type[PreTrainedModel]) -> bool:
    """Return whether `cls` is causal only if its config sets is_decoder."""
    config: Any = cls.config_class
    names = {field.name for field in dataclasses.fields(config)}
    encodes_too = {"encoder_layers", "num_encoder_layers"} & names
    return cls.__name__ in class_names("CAUSAL_LM").values() and "is_decoder" in names and not encodes_too
