"""The positions in a GGUF file: the metadata that llama.cpp reads, and the tensors of divisors.

The keys are those of the `gguf` package. Architecture "llama" divides the angle of pair i by `rope_freqs.weight` [R/2]
and multiplies cos and sin by `rope.scaling.attn_factor`: both together express any rotation by fixed
angles exactly. It rotates whole heads, so pairs that do not turn get a divisor of 1e30. Architecture "phi3" reads a
short and a long list instead, and the same list twice does the same. Others multiply cos and sin alone.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_posswap.checkpoints.exports.claims import FACTORED, LLAMA_KIND, usual_bands, usual_yarn
from hf_posswap.checkpoints.exports.mechanism import PositionConfig
from hf_posswap.compat.transformers_rotary import rope_function

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
STILL = 1e30
"""The divisor of a pair that does not turn."""


def gguf_metadata(position_config: PositionConfig, rotary_dim: int | None) -> dict[str, Any]:
    """Return the metadata of a GGUF file that concern positions, by key; {} for an architecture that is not known.

    Args:
        position_config: the mechanism.
        rotary_dim: R, the rotated dimensions of a head; None without rotation. For architecture "llama" that is the
            whole head: see `divisors`.

    Example:
        >>> rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
        >>> metadata = gguf_metadata(PositionConfig("rope", "llama", rope, 64, 32, None), 16)
        >>> metadata["llama.rope.scaling.type"], metadata["llama.rope.scaling.factor"]
        ('linear', 2.0)
    """
    name = ARCHITECTURES.get(position_config.model_type)
    if name is None or position_config.kind == "plugin":
        return {}
    keys: dict[str, Any] = {"context_length": position_config.length}
    if position_config.kind == "rope" and rotary_dim is not None:
        keys |= {"rope.freq_base": float(position_config.rope["rope_theta"]), "rope.dimension_count": rotary_dim}
        keys |= _scaling(position_config)
    if "sliding_attention" in position_config.other_sets:
        keys["rope.freq_base_swa"] = float(position_config.other_sets["sliding_attention"]["rope_theta"])
    return {f"{name}.{key}": value for key, value in keys.items()}


def _scaling(position_config: PositionConfig) -> dict[str, Any]:
    if position_config.rope_type == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": position_config.factor}
    factored = position_config.model_type in FACTORED
    if usual_yarn(position_config) or (usual_bands(position_config) and not factored):
        keys: dict[str, Any] = {
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
    if position_config.rope_type == "longrope" and not position_config.fixed_list:
        original = position_config.rope["original_max_position_embeddings"]
        keys |= {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": original}
    return keys


def divisors(config: Any, position_config: PositionConfig, rotary_dim: int) -> dict[str, list[float]]:
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
    if position_config.rope_type == "longrope" and not position_config.fixed_list:
        short, long = position_config.rope["short_factor"], position_config.rope["long_factor"]
    elif fixed and position_config.model_type in LLAMA_KIND:
        return {"rope_freqs.weight": fixed}
    else:
        short = long = fixed
    pair = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    return {name: [float(value) for value in values] for name, values in pair.items() if values}


def _fixed(config: Any, position_config: PositionConfig, rotary_dim: int) -> list[float]:
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
