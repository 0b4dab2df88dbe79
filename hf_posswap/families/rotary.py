"""Families with a standard rotary module, most of them by rule: a config with rope parameters, layers in `layers`.

What differs from transformers' own conventions is refused by `locate`, never guessed.
"""

from __future__ import annotations

from torch import nn

from hf_posswap.families.base import Family, StackSpec, paths_of, register
from hf_posswap.families.rope_config import has_rope, inv_freq_names

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


def rotary_modules(root: nn.Module) -> list[str]:
    """Return the paths below `root` of the modules that own rotary frequencies and are called as all such are."""
    return [path for path in paths_of(root, lambda m: bool(inv_freq_names(m))) if path.endswith("rotary_emb")]


_MODALITIES = (
    "acoustic_tokenizer_encoder", "audio_tower", "embed_audio", "embed_tokens_extend", "embed_vision", "encoder",
    "multi_modal_projector", "pos_emb", "projector", "semantic_tokenizer_encoder", "time_embedding", "vision_embedder",
    "vision_model", "vision_tower", "visual", "word_timestamp_encoder",
)  # fmt: skip
"""What other modalities' towers are called: they keep their positions."""

register(
    Family(
        name="rotary",
        summary="every model with a standard rotary module: Llama, Mistral, Qwen, Gemma, Cohere, GLM, ModernBERT, ...",
        rotary=rotary_modules,
        attention="layers.*.self_attn|attn|attention|self_attention",
        attention_proved=ATTENTION_PROVED,
        matches=has_rope,
        towers=("", "language_model", "text_model", "model"),
        kept=_MODALITIES,
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
register(
    Family(
        name="dbrx",
        summary="DBRX: rotary, attention beside a norm in each block, causal",
        model_types=("dbrx",),
        rotary=rotary_modules,
        attention="blocks.*.norm_attn_norm.attn",
        attention_proved=ATTENTION_PROVED,
    )
)
register(
    Family(
        name="hrm_text",
        summary="HRM: two modules of layers that are passed several times share one rotary, causal",
        model_types=("hrm_text",),
        rotary=rotary_modules,
        attention="L_module|H_module.layers.*.self_attn",
        attention_proved=ATTENTION_PROVED,
    )
)
register(
    Family(
        name="zamba2",
        summary="Zamba2: rotary in the attention blocks that its Mamba layers share, causal",
        model_types=("zamba2",),
        rotary=rotary_modules,
        attention="layers.*.shared_transformer.self_attn",
        attention_proved=ATTENTION_PROVED,
    )
)
register(
    Family(
        name="t5gemma",
        summary="T5Gemma: rotary in encoder and decoder",
        model_types=("t5gemma",),
        rotary=rotary_modules,
        attention_proved=ATTENTION_PROVED,
        stacks=(
            StackSpec("encoder", "encoder.layers.*.self_attn", entry="encoder"),
            StackSpec("decoder", "decoder.layers.*.self_attn", entry="decoder"),
        ),
    )
)
register(
    Family(
        name="t5gemma2",
        summary="T5Gemma 2: rotary in the text encoder and the decoder",
        model_types=("t5gemma2",),
        rotary=rotary_modules,
        attention_proved=ATTENTION_PROVED,
        stacks=(
            StackSpec("encoder", "encoder.text_model.layers.*.self_attn", entry="encoder"),
            StackSpec("decoder", "decoder.layers.*.self_attn", entry="decoder"),
        ),
        kept=("encoder.vision_tower",),
    )
)
