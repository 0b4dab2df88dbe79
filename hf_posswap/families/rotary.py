"""Families with a standard rotary module, by rule: a config with one set of rope parameters, layers in `layers`.

What differs from transformers' own conventions is refused by `locate`, never guessed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from hf_posswap.families.base import Family, inv_freq_names, paths_of, register

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


ATTENTION_PROVED = frozenset(
    """
    apertus arcee aria_text bitnet cohere cwm diffllama doge ernie4_5 ernie4_5_moe falcon_h1 flex_olmo gemma
    glm glm4 glm4_moe gpt_neox granite granitemoe granitemoeshared helium hy_v3 hyperclovax internlm3
    iquestcoder jais2 kolibri1 lfm2 llama minimax_m2 minimax_m3_vl_text mistral mixtral moshi olmo olmo2
    olmo_hybrid olmoe persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe
    qwen3_next seed_oss solar_open stablelm starcoder2
    """.split()
)
"""Model types in which RoPE re-applied inside attention equals the native model exactly, in all layers; a slow test
runs each. Others may leave RoPE out of some layers, or rotate part of a wider head: their attention site is refused."""


def has_rope(config: PreTrainedConfig) -> bool:
    """Return whether `config` has one flat set of rope parameters (not one for each layer type)."""
    parameters = getattr(config, "rope_parameters", None)
    return isinstance(parameters, dict) and "rope_type" in parameters


def rotary_modules(root: nn.Module) -> list[str]:
    """Return the paths below `root` of the modules that own rotary frequencies."""
    return paths_of(root, lambda module: bool(inv_freq_names(module)))


register(
    Family(
        name="rotary",
        summary="every model with a standard rotary module: Llama, Mistral, Qwen, Gemma, Cohere, GLM, ...",
        rotary=rotary_modules,
        attention="layers.*.self_attn",
        attention_proved=ATTENTION_PROVED,
        matches=has_rope,
    )
)
register(
    Family(
        name="gpt_neox",
        summary="GPT-NeoX: partial rotary, causal",
        model_types=("gpt_neox",),
        rotary=rotary_modules,
        attention="layers.*.attention",
    )
)
