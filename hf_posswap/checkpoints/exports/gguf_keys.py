"""What a GGUF file says of positions: the metadata that llama.cpp reads, and the tensors of divisors.

The keys are those of the `gguf` package. Architecture "llama" divides the angle of pair i by `rope_freqs.weight` [R/2]
and multiplies cos and sin by `rope.scaling.attn_factor`: with both, any rotation by fixed angles is said exactly. It
asks for a rotation of the whole head, so pairs that shall not turn get a divisor of 1e30.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_posswap.checkpoints.exports.claims import LLAMA_KIND, usual_yarn
from hf_posswap.checkpoints.exports.mechanism import Stated
from hf_posswap.compat.transformers_rotary import rope_function

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
    "qwen2": "llama",
    "qwen3": "qwen3",
    "smollm3": "smollm3",
    "starcoder2": "starcoder2",
}
"""llama.cpp's name of the architecture, by transformers' model type. Qwen2 is a Llama with biases, and written as one:
architecture "qwen2" reads no `rope_freqs.weight`."""
STILL = 1e30
"""The divisor of a pair that does not turn."""


def gguf_metadata(stated: Stated, rotary_dim: int | None) -> dict[str, Any]:
    """Return the metadata of a GGUF file that concern positions, by key; {} for an architecture that is not known.

    Args:
        stated: the mechanism.
        rotary_dim: R, the rotated dimensions of a head; None without rotation. For architecture "llama" that is the
            whole head: see `divisors`.

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
        keys |= {"rope.freq_base": float(stated.rope["rope_theta"]), "rope.dimension_count": rotary_dim}
        keys |= _scaling(stated)
    return {f"{name}.{key}": value for key, value in keys.items()}


def _scaling(stated: Stated) -> dict[str, Any]:
    if stated.rope_type == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": stated.factor}
    if usual_yarn(stated):
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": stated.factor,
            "rope.scaling.original_context_length": stated.rope["original_max_position_embeddings"],
        }
    if stated.rope_type not in ("yarn", "longrope") or stated.model_type not in LLAMA_KIND:
        return {}
    keys: dict[str, Any] = {"rope.scaling.attn_factor": stated.attention}
    if stated.rope_type == "longrope" and not stated.fixed_list:
        original = stated.rope["original_max_position_embeddings"]
        keys |= {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": original}
    return keys


def divisors(config: Any, stated: Stated, head_dim: int) -> dict[str, list[float]]:
    """Return the tensors of divisors [D/2] by name, that say a rotation to architecture "llama"; {} where none is due.

    Pair i turns by theta^(-2i/D) / divisor_i each token, with D the dimensions of a head, whatever share of them turns.

    Args:
        config: of the stock model, for transformers' own formulas.
        stated: the mechanism.
        head_dim: D.
    """
    if stated.kind != "rope" or stated.model_type not in LLAMA_KIND:
        return {}
    if stated.rope_type == "longrope":
        short, long = stated.rope["short_factor"], stated.rope["long_factor"]
        if stated.fixed_list:
            return {"rope_freqs.weight": [float(one) for one in short]}
        pair = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
        return {name: [float(one) for one in values] for name, values in pair.items()}
    if stated.rope_type in ("default", "linear", "dynamic") or usual_yarn(stated):
        return {}
    frequencies = rope_function(stated.rope_type)(config, "cpu")[0].tolist()  # [R/2]
    frequencies += [0.0] * (head_dim // 2 - len(frequencies))
    plain = 1.0 / stated.rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)  # rounded as there
    return {"rope_freqs.weight": [p / f if f else STILL for p, f in zip(plain.tolist(), frequencies, strict=True)]}
