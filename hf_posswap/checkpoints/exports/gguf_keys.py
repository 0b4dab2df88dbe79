"""The rope metadata of a GGUF file: the keys that llama.cpp reads, and what they must be for a mechanism.

The keys are those of the `gguf` package, and the tests write and read them with it. llama.cpp itself was not run.
"""

from __future__ import annotations

import math
from typing import Any

from hf_posswap.checkpoints.exports.mechanism import Stated

ARCHITECTURES = {
    "bert": "bert",
    "cohere": "command-r",
    "gemma": "gemma",
    "gpt2": "gpt2",
    "gpt_neox": "gptneox",
    "llama": "llama",
    "mistral": "llama",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "smollm3": "smollm3",
    "starcoder2": "starcoder2",
}
"""llama.cpp's name of the architecture, by transformers' model type."""


def gguf_metadata(stated: Stated, rotary_dim: int | None) -> dict[str, Any]:
    """Return the metadata of a GGUF file that concern positions, by key; {} for an architecture that is not known.

    Args:
        stated: the mechanism.
        rotary_dim: R, the rotated dimensions of a head; None without rotation.

    Example:
        >>> rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
        >>> found = gguf_metadata(Stated("rope", "llama", rope, 64, 32, None), 16)
        >>> found["llama.rope.scaling.type"], found["llama.rope.scaling.factor"]
        ('linear', 2.0)
    """
    name = ARCHITECTURES.get(stated.model_type)
    if name is None or stated.kind == "plugin":
        return {}
    keys: dict[str, Any] = {"context_length": stated.length}
    if stated.kind == "rope" and rotary_dim is not None:
        keys |= {"rope.freq_base": stated.rope["rope_theta"], "rope.dimension_count": rotary_dim}
        keys |= _scaling(stated)
    return {f"{name}.{key}": value for key, value in keys.items()}


def _scaling(stated: Stated) -> dict[str, Any]:
    match stated.rope_type:
        case "linear":
            return {"rope.scaling.type": "linear", "rope.scaling.factor": stated.factor}
        case "yarn":
            return {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": stated.factor,
                "rope.scaling.original_context_length": stated.rope["original_max_position_embeddings"],
                "rope.scaling.attn_factor": stated.attention / stated.usual_attention,
                "rope.scaling.yarn_beta_fast": float(stated.rope.get("beta_fast") or 32.0),
                "rope.scaling.yarn_beta_slow": float(stated.rope.get("beta_slow") or 1.0),
            }
    return {}


def rope_freqs(stated: Stated, rotary_dim: int) -> list[float] | None:
    """Return the tensor `rope_freqs.weight`, the divisors of theta_i [R/2], that "llama3" needs; None for other types.

    Dubey et al. 2024, https://arxiv.org/abs/2407.21783; the converter computes the same.

    Args:
        stated: the mechanism.
        rotary_dim: R, the rotated dimensions of a head.
    """
    if stated.rope_type != "llama3":
        return None
    rope, divisors = stated.rope, []
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    for i in range(rotary_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * i / rotary_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(stated.factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / stated.factor + smooth))
    return divisors
