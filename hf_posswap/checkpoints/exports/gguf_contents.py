"""What a GGUF file holds of a model: the positions, and the weights and sizes by a maker for each architecture.

The keys are those of the `gguf` package. Architecture "llama" divides the angle of pair i by `rope_freqs.weight` [R/2]
and multiplies cos and sin by `rope.scaling.attn_factor`: both together express any rotation by fixed
angles exactly. It rotates whole heads, so pairs that do not turn get a divisor of 1e30. Architecture "phi3" reads a
short and a long list instead, and the same list twice does the same. Others multiply cos and sin alone.

What llama.cpp computes otherwise than a config says, or has no tensor for, is refused: each condition is one of its
code for that architecture (src/models).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posswap.checkpoints.exports.claims import FACTORED, LLAMA_KIND, every_sixth, usual_bands, usual_yarn
from hf_posswap.checkpoints.exports.mechanism import PositionConfig
from hf_posswap.compat.transformers_attention import rope_function
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.geometry import ConfigSizes
from hf_posswap.rope_math import permute_rows

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ARCHITECTURES = {
    "bert": "bert",
    "cohere": "command-r",
    "gemma": "gemma",
    "gemma3_text": "gemma3",
    "gpt2": "gpt2",
    "gpt_neox": "gptneox",
    "llama": "llama",
    "mistral": "llama",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "qwen2": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "smollm3": "smollm3",
    "starcoder2": "starcoder2",
}
"""llama.cpp's name of the architecture, by transformers' model type. Qwen2 is written as a Llama with biases:
architecture "qwen2" reads no `rope_freqs.weight`."""
SLIDING = ("gemma3_text",)
"""Model types written here whose sliding window llama.cpp has: others see all tokens there. Of Phi-3 it reads the
window, and lets it be (https://github.com/ggml-org/llama.cpp/pull/13676)."""
STILL = 1e30
"""The divisor of a pair that does not turn."""
Weights = dict[str, Tensor]
_TANH_GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")


def gguf_metadata(position_config: PositionConfig, rotary_dim: int | None) -> dict[str, object]:
    """Return the metadata of a GGUF file that concern positions, by key; {} for an architecture that is not known.

    Args:
        position_config: the mechanism.
        rotary_dim: R, the rotated dimensions of a head; None without rotation. For architecture "llama" that is the
            whole head: see `divisors`.

    Example:
        >>> from hf_posswap.families.rope_config import RopeSettings
        >>> rope = RopeSettings({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
        >>> metadata = gguf_metadata(PositionConfig("rope", "llama", rope, 64, 32, None), 16)
        >>> metadata["llama.rope.scaling.type"], metadata["llama.rope.scaling.factor"]
        ('linear', 2.0)
    """
    name = ARCHITECTURES.get(position_config.model_type)
    if name is None or position_config.kind == "plugin":
        return {}
    keys: dict[str, object] = {"context_length": position_config.length}
    if position_config.kind == "rope" and rotary_dim is not None:
        keys |= {"rope.freq_base": float(position_config.rope["rope_theta"]), "rope.dimension_count": rotary_dim}
        keys |= _scaling(position_config)
    for each in position_config.others:
        if each.layer_type == "sliding_attention":
            keys["rope.freq_base_swa"] = float(each.values["rope_theta"])
    return {f"{name}.{key}": value for key, value in keys.items()}


def _scaling(position_config: PositionConfig) -> dict[str, Any]:
    if position_config.rope_type == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": position_config.factor}
    factored = position_config.model_type in FACTORED
    if usual_yarn(position_config) or (usual_bands(position_config) and not factored):
        keys = {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": position_config.factor,
            "rope.scaling.original_context_length": position_config.rope["original_max_position_embeddings"],
        }
        if not usual_yarn(position_config):  # on top of 0.1 ln s + 1
            keys["rope.scaling.attn_factor"] = position_config.attention / position_config.usual_attention
        return keys
    if position_config.rope_type not in ("yarn", "longrope") or not factored:
        return {}
    keys = {"rope.scaling.attn_factor": position_config.attention}
    if position_config.rope_type == "longrope" and position_config.rotation.follows_length:
        original = position_config.rope["original_max_position_embeddings"]
        keys |= {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": original}
    return keys


def divisors(config: PreTrainedConfig, position_config: PositionConfig, rotary_dim: int) -> dict[str, list[float]]:
    """Return the tensors of divisors [R/2] that tell llama.cpp the rotation, by name; {} without any.

    Pair i turns by theta^(-2i/R) / divisor_i each token.

    Args:
        config: of the stock model, for transformers' own formulas.
        position_config: the mechanism.
        rotary_dim: R, the dimensions of a head that llama.cpp rotates; for architecture "llama" the whole head, however
            many of them turn.
    """
    if position_config.kind != "rope" or position_config.model_type not in FACTORED:
        return {}
    fixed = _fixed(config, position_config, rotary_dim)
    if position_config.rope_type == "longrope" and position_config.rotation.follows_length:
        short, long = position_config.rope["short_factor"], position_config.rope["long_factor"]
    elif fixed and position_config.model_type in LLAMA_KIND:
        return {"rope_freqs.weight": fixed}
    else:
        short = long = fixed
    pair = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    return {name: [float(value) for value in values] for name, values in pair.items() if values}


def _fixed(config: PreTrainedConfig, position_config: PositionConfig, rotary_dim: int) -> list[float]:
    """Return the divisors for all lengths; [] where the metadata alone say the rotation."""
    if position_config.rope_type == "longrope":
        return [float(value) for value in position_config.rope["short_factor"]]
    if position_config.rope_type in ("default", "linear", "dynamic") or usual_yarn(position_config):
        return []
    frequencies = rope_function(position_config.rope_type)(config, "cpu")[0].tolist()  # [R/2], or those that turn
    frequencies += [0.0] * (rotary_dim // 2 - len(frequencies))
    plain = 1.0 / position_config.rope["rope_theta"] ** (
        torch.arange(0, rotary_dim, 2).float() / rotary_dim
    )  # rounded as there
    return [p / f if f else STILL for p, f in zip(plain.tolist(), frequencies, strict=True)]


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


def contents_of(model: PreTrainedModel, position_config: PositionConfig) -> Contents:
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
    if getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedSwapError(
            f"{type(model).__name__} is quantized, and a GGUF file is made of floating-point weights: export the "
            "checkpoint before it was quantized; --dtype q8_0 writes 8 bits."
        )
    return maker(model, position_config)


def rotated(config: PreTrainedConfig, position_config: PositionConfig) -> int:
    """Return R, the dimensions of a head that llama.cpp rotates."""
    width = ConfigSizes.of(config).head_dim
    if position_config.model_type not in ("gpt_neox", "phi3") or position_config.rope_type == "proportional":
        return width
    return int(width * position_config.rope.get("partial_rotary_factor", 1.0))


def stays_whole(name: str) -> bool:
    """Return whether a matrix, by its name in transformers, chooses or weighs experts: it is not rounded."""
    return name.endswith((".mlp.gate.weight", ".mlp.shared_expert_gate.weight"))


def _llama(model: PreTrainedModel, position_config: PositionConfig) -> Contents:
    """Return a Llama: RMS norms, gated SiLU, pairs of neighbours rotated."""
    config, weights = model.config, model.state_dict()
    _only("hidden_act", config.hidden_act, ("silu",))
    _whole_heads(config, position_config)
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, ConfigSizes.of(config).head_dim
    for name, weight in weights.items():
        for projection, count in (("q_proj", heads), ("k_proj", groups)):
            if f".{projection}." in name:
                weights[name] = permute_rows(weight, count, width, "half", "interleaved")
    return Contents("llama", _gated_keys(config), _untied(model, weights))


def _smollm3(model: PreTrainedModel, position_config: PositionConfig) -> Contents:
    """Return a SmolLM3: a Llama in which every fourth layer does not rotate, without biases."""
    _without_biases(model)
    llama = _llama(model, position_config)
    return Contents("smollm3", llama.keys, llama.weights)


def _qwen3(model: PreTrainedModel, position_config: PositionConfig) -> Contents:
    """Return a Qwen3: queries and keys with norms of their own, without biases."""
    config = model.config
    _only("hidden_act", config.hidden_act, ("silu",))
    _whole_heads(config, position_config)
    _without_biases(model)
    return Contents("qwen3", _gated_keys(config), _untied(model, model.state_dict()))


def _gemma3(model: PreTrainedModel, position_config: PositionConfig) -> Contents:
    """Return the language model of a Gemma 3: it adds 1 to the weights of its norms, and GGUF has the sum."""
    config, layers = model.config, model.config.num_hidden_layers
    _only("hidden_activation", config.hidden_activation, ("gelu_pytorch_tanh",))
    _only("attn_logit_softcapping", config.attn_logit_softcapping, (None,))
    _only("use_bidirectional_attention", bool(getattr(config, "use_bidirectional_attention", False)), (False,))
    scale = config.hidden_size // config.num_attention_heads if layers == _LARGEST_GEMMA3 else config.head_dim
    _only("query_pre_attn_scalar", config.query_pre_attn_scalar, (scale,))
    _whole_heads(config, position_config)
    _without_biases(model)
    slides = [layer_type == "sliding_attention" for layer_type in config.layer_types]
    keys = _gated_keys(config)
    if any(slides):
        keys["attention.sliding_window"] = config.sliding_window
    if any(slides) and not every_sixth(position_config):
        keys["attention.sliding_window_pattern"] = slides
    if config.final_logit_softcapping is not None:
        keys["final_logit_softcapping"] = config.final_logit_softcapping
    weights = {
        name: weight.float() + 1.0 if name.endswith("norm.weight") else weight
        for name, weight in model.state_dict().items()
    }
    return Contents("gemma3", keys, _untied(model, weights), loose=True)


_LARGEST_GEMMA3 = 62
"""Layers of the Gemma 3 whose scores llama.cpp divides by another number."""


def _phi3(model: PreTrainedModel, position_config: PositionConfig) -> Contents:
    """Return a Phi-3: query, key and value lie together, and so do gate and up, as in llama.cpp."""
    config = model.config
    _only("hidden_act", config.hidden_act, ("silu",))
    keys = _square(config, _gated_keys(config))
    if config.sliding_window:
        keys["attention.sliding_window"] = config.sliding_window
    return Contents("phi3", keys, _untied(model, model.state_dict()))


def _moe(model: PreTrainedModel, position_config: PositionConfig) -> Contents:
    """Return a Qwen2-MoE or a Qwen3-MoE: the experts of a layer lie in three tensors, gate and up apart."""
    config, first = model.config, position_config.model_type == "qwen2_moe"
    _only("hidden_act", config.hidden_act, ("silu",))
    _only("norm_topk_prob", bool(config.norm_topk_prob), (not first,))
    _only("decoder_sparse_step", config.decoder_sparse_step, (1,))
    _only("mlp_only_layers", list(config.mlp_only_layers or []), ([],))
    _whole_heads(config, position_config)
    keys = _gated_keys(config) | {
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }
    weights: Weights = {}
    for name, weight in model.state_dict().items():
        stem = name.rpartition(".")[0]
        if name.endswith(".experts.gate_up_proj"):  # [E, 2 F, H]
            gate, up = weight.chunk(2, dim=1)
            weights |= {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
        elif name.endswith(".experts.down_proj"):
            weights[f"{name}.weight"] = weight
        else:
            weights[name] = weight.flatten() if name.endswith(".shared_expert_gate.weight") else weight
    if not first:
        _without_biases(model)
        return Contents("qwen3moe", keys, _untied(model, weights))
    keys = _square(config, keys)
    keys["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    weights["lm_head.weight"] = model.get_output_embeddings().weight.detach()  # llama.cpp has no tied output here
    return Contents("qwen2moe", keys, weights)


def _gpt2(model: PreTrainedModel, position_config: PositionConfig) -> Contents:
    """Return a GPT-2: its linear layers hold their weights transposed."""
    config, weights = model.config, model.state_dict()
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


def _gpt_neox(model: PreTrainedModel, position_config: PositionConfig) -> Contents:
    """Return a GPT-NeoX: query, key and value of a head lie together there, and apart in llama.cpp."""
    config, weights = model.config, model.state_dict()
    _only("hidden_act", config.hidden_act, _TANH_GELU)
    _only("attention_bias", getattr(config, "attention_bias", True), (True,))
    heads, width = config.num_attention_heads, ConfigSizes.of(config).head_dim
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


def _gated_keys(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the sizes of a model with RMS norms and gated feed-forward layers."""
    return {
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": ConfigSizes.of(config).head_dim,
        "attention.value_length": ConfigSizes.of(config).head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
    }


def _whole_heads(config: PreTrainedConfig, position_config: PositionConfig) -> None:
    width = ConfigSizes.of(config).head_dim
    whole = position_config.rope_type == "proportional"
    turned = width if whole else int(width * position_config.rope.get("partial_rotary_factor", 1.0))
    if turned != width:
        raise UnsupportedSwapError(
            f"llama.cpp rotates whole heads in a {type(config).__name__.removesuffix('Config').removesuffix('Text')}; "
            f"where {turned} of {width} dimensions turn it is not written."
        )


def _without_biases(model: PreTrainedModel) -> None:
    biases = sorted({name.split(".", 3)[-1] for name in model.state_dict() if name.endswith(".bias")})
    if biases:
        raise UnsupportedSwapError(f"llama.cpp has no {', '.join(biases)} in this architecture, and the model has.")


_HEAD = ("attention.key_length", "attention.value_length")


def _square(config: PreTrainedConfig, keys: dict[str, float]) -> dict[str, Any]:
    """Return `keys` without the width of a head, where llama.cpp takes its share of the model's width."""
    width = config.num_attention_heads * ConfigSizes.of(config).head_dim
    if width != config.hidden_size:
        raise UnsupportedSwapError(
            "in this architecture of llama.cpp all heads together are as wide as the model, and here they have "
            f"{width} dimensions and the model {config.hidden_size}."
        )
    return {name: value for name, value in keys.items() if name not in _HEAD}


def _untied(model: PreTrainedModel, weights: Weights) -> Weights:
    """Return `weights` without an output layer that is the token embeddings: llama.cpp takes those by itself."""
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return {name: weight for name, weight in weights.items() if not (tied and name == "lm_head.weight")}


def _only(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        wanted = " or ".join(map(repr, allowed))
        raise UnsupportedSwapError(
            f"llama.cpp computes {name} {wanted} in this architecture, and the model has {value!r}."
        )


MAKERS: dict[str, Callable[[PreTrainedModel, PositionConfig], Contents]] = {
    **dict.fromkeys(LLAMA_KIND, _llama),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "qwen2_moe": _moe,
    "qwen3": _qwen3,
    "qwen3_moe": _moe,
    "smollm3": _smollm3,
}
"""By model type."""
