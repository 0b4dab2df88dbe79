"""The weights and sizes of a model as GGUF has them, for the architectures llama, gpt2 and gptneox."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hf_posswap.checkpoints.exports.claims import LLAMA_KIND
from hf_posswap.checkpoints.exports.mechanism import PositionConfig
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.rope_layout import permute_rows

Weights = dict[str, Tensor]
_TANH_GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class Contents:
    """What a GGUF file holds of a model, positions aside.

    Attributes:
        architecture: as llama.cpp calls it.
        keys: sizes and constants, without the architecture before them.
        weights: by the names of transformers, in the order of rows that llama.cpp wants.
        loose: whether llama.cpp computes the activation by a table in half precision (GELU).
    """

    architecture: str
    keys: dict[str, Any]
    weights: Weights = field(repr=False)
    loose: bool = False


def contents_of(model: Any, position_config: PositionConfig) -> Contents:
    """Return what a GGUF file of `model`, a stock causal language model, holds.

    Raises:
        UnsupportedSwapError: its architecture is not written here, or a setting of it is not llama.cpp's: which.
    """
    maker = MAKERS.get(position_config.model_type)
    if maker is None or not hasattr(model, "lm_head") and not hasattr(model, "embed_out"):
        raise UnsupportedSwapError(
            f"no GGUF file is written here for {type(model).__name__}: only for the causal language models of type "
            f"{', '.join(MAKERS)}. Give a folder to -o, and use llama.cpp's convert_hf_to_gguf.py on it."
        )
    return maker(model, position_config)


def head_dim(config: Any) -> int:
    """Return D, the dimensions of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _llama(model: Any, position_config: PositionConfig) -> Contents:
    """Return a Llama: RMS norms, gated SiLU, pairs of neighbours rotated."""
    config, weights = model.config, _weights(model)
    _only("hidden_act", config.hidden_act, ("silu",))
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, head_dim(config)
    rotated = int(
        width
        * (
            1.0
            if position_config.rope_type == "proportional"
            else position_config.rope.get("partial_rotary_factor", 1.0)
        )
    )
    if rotated != width:
        raise UnsupportedSwapError(
            f"llama.cpp rotates whole heads in a Llama; where {rotated} of {width} dimensions turn it is not written."
        )
    for name, weight in weights.items():
        for projection, count in (("q_proj", heads), ("k_proj", groups)):
            if f".{projection}." in name:
                weights[name] = permute_rows(weight, count, width, "half", "interleaved")
    keys = {
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": groups,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
    }
    return Contents("llama", keys, _untied(model, weights))


def _gpt2(model: Any, position_config: PositionConfig) -> Contents:
    """Return a GPT-2: its linear layers hold their weights transposed."""
    config, weights = model.config, _weights(model)
    _only("activation_function", config.activation_function, _TANH_GELU)
    _only("scale_attn_weights", config.scale_attn_weights, (True,))
    _only("scale_attn_by_inverse_layer_idx", config.scale_attn_by_inverse_layer_idx, (False,))
    for name, weight in weights.items():
        if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            weights[name] = weight.T
    keys = {
        "embedding_length": config.n_embd,
        "block_count": config.n_layer,
        "feed_forward_length": config.n_inner or 4 * config.n_embd,
        "attention.head_count": config.n_head,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "vocab_size": config.vocab_size,
    }
    return Contents("gpt2", keys, _untied(model, weights), loose=True)


def _gpt_neox(model: Any, position_config: PositionConfig) -> Contents:
    """Return a GPT-NeoX: query, key and value of a head lie together there, and apart in llama.cpp."""
    config, weights = model.config, _weights(model)
    _only("hidden_act", config.hidden_act, _TANH_GELU)
    _only("attention_bias", getattr(config, "attention_bias", True), (True,))
    heads, width = config.num_attention_heads, head_dim(config)
    for name, weight in weights.items():
        if ".query_key_value." in name:
            apart = weight.reshape(heads, 3, width, *weight.shape[1:]).transpose(0, 1)  # [3, H, D, ...]
            weights[name] = apart.reshape(weight.shape)
    if not {"embed_out.weight", "lm_head.weight"} & weights.keys():  # llama.cpp has no tied output here
        weights["lm_head.weight"] = model.get_output_embeddings().weight.detach()
    keys = {
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.layer_norm_epsilon": config.layer_norm_eps,
        "use_parallel_residual": config.use_parallel_residual,
        "vocab_size": config.vocab_size,
    }
    return Contents("gptneox", keys, weights, loose=True)


def _weights(model: Any) -> Weights:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def _untied(model: Any, weights: Weights) -> Weights:
    """Return `weights` without an output layer that is the token embeddings: llama.cpp takes those by itself."""
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return {name: weight for name, weight in weights.items() if not (tied and name == "lm_head.weight")}


def _only(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        wanted = " or ".join(map(repr, allowed))
        raise UnsupportedSwapError(
            f"llama.cpp computes {name} {wanted} in this architecture, and the model has {value!r}."
        )


MAKERS: dict[str, Callable[[Any, PositionConfig], Contents]] = dict.fromkeys(LLAMA_KIND, _llama) | {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}
"""By model type."""
