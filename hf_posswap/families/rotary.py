"""Families with a standard rotary module, most matched by rule: rope parameters in the config, layers in `layers`.

`locate` refuses a model that deviates from transformers' conventions; it never guesses. Whether a scheme works inside
the attention of a rotary model is tested for each model type: that of the sub-config with the rope parameters, so the
text tower's, not the whole model's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hf_posswap.families.base import Family, StackSpec, register
from hf_posswap.families.modules import module_paths
from hf_posswap.families.rope_config import has_rope, inv_freq_names

ATTENTION_PROVED = frozenset(
    """
    afmoe apertus apertus1p5_text arcee aria_text bamba beam bitnet cohere cohere2 cohere2_moe
    cohere_compass_text cwm dbrx diffllama doge dots1 emu3_text_model ernie4_5 ernie4_5_moe esmc eurobert exaone
    exaone4 exaone_moe falcon_h1 flex_olmo flint gemma gemma2 gemma3_text gemma4_text gemma4_unified_text glm
    glm4 glm4_moe gpt_neox gpt_oss granite granitemoe granitemoehybrid granitemoeshared gte helium hy_v3
    hyperclovax internlm3 iquestcoder jais2 jetmoe jina_embeddings_v3 kolibri1 laguna lara_mini lfm2 lfm2_moe
    lfm3 llama llama4_text mellum mimo_v2_flash minimax_m2 minimax_m3_vl_text ministral ministral3 mistral
    mixtral mllama_text_model modernbert modernbert-decoder moshi nemotron neomme nomic_bert olmo olmo2 olmo3
    olmo_hybrid olmoe persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text
    qwen3_5_text qwen3_moe qwen3_next sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2 t5_gemma_module
    ultrabert vaultgemma zamba2 zaya
    """.split()
)
"""Model types in which RoPE re-applied inside attention equals the native model exactly, with and without a cache; a
slow test runs every class of them."""


def _has_rope(module: nn.Module) -> bool:
    return bool(module.use_rope)


def _is_local(module: nn.Module) -> bool:
    return bool(module.is_local_attention)


def _is_windowed(module: nn.Module) -> bool:
    return module.sliding_window is not None


def _is_windowed_or_forced(module: nn.Module) -> bool:
    return module.sliding_window is not None or module.force_rope


def _is_windowed_where_some_are(module: Any) -> bool:
    return module.sliding_window is None or module.is_sliding


ROTATES: dict[str, Callable[[nn.Module], bool]] = {
    "afmoe": _is_local,
    **dict.fromkeys(("cohere2", "flint", "lara_mini"), _is_windowed),
    "cohere2_moe": _is_windowed_or_forced,
    **dict.fromkeys(("exaone4", "exaone_moe"), _is_windowed_where_some_are),
    **dict.fromkeys(("llama4_text", "smollm3"), _has_rope),
}
"""For model types where not all layers rotate: whether an attention module does, as its forward decides."""

_LATENT = "its latent attention rotates a separate part of each head"
_INDEXED = "its indexer, which selects the tokens to attend to, uses the same rotary module"
_NORMALISED = "its queries and keys are normalised after the rotation"
_LINEAR = "some of its layers have linear attention"
_LOOPED = "its layers run several times in each forward, each time on new keys"

TURNING_REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "sarvam_mla", "youtu"),
        _LATENT,
    ),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), _NORMALISED),
    "nanochat": "its pairs rotate in the opposite direction",
}
"""Model types with a known reason why q and k cannot be rotated inside attention; a bias can be added there."""

ATTENTION_REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4", "hy_v4_vl_text", "qwen4_exp_text"), _INDEXED
    ),
    "longcat_flash": _LATENT,
    **dict.fromkeys(("bailing_hybrid", "minimax"), _LINEAR),
    "deepseek_v4": "it attends to compressed keys of several tokens",
    "gemma3n_text": "some of its layers reuse the keys of others, which are already rotated",
    "gpt_neox_japanese": "its attention does not go through transformers' AttentionInterface",
    **dict.fromkeys(("dory", "hrm_text"), _LOOPED),
    "t5gemma2_decoder": "its self-attention and its cross-attention are one",
    "t5gemma2_text": "its decoder's self-attention and cross-attention are one",
    "voxtral_realtime_text": "it cannot run on text alone, so it is not tested",
}
"""Model types with a known reason why no scheme works inside, as the end of a sentence."""

MOVED_BY_SHIFT: dict[str, str] = {
    **{name: TURNING_REFUSED[name] for name in ("hunyuan_v1_dense", "hunyuan_v1_moe")},
    "deepseek_v4": ATTENTION_REFUSED["deepseek_v4"],
    "dory": "its queries are scaled channel by channel after the rotation",
    **{name: ATTENTION_REFUSED[name] for name in ("t5gemma2_decoder", "t5gemma2_text")},
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa"),
        "older releases of transformers compare its position ids with indices counted from the first token",
    ),
    "switch_transformers": "each of its experts takes a limited number of tokens of a sequence, and padding counts too",
}
"""Model types whose attention changes if all positions are shifted, under any rotation, and why."""

POSITIONS_ELSEWHERE: dict[str, str] = {
    **{name: MOVED_BY_SHIFT[name] for name in ("deepseek_v32", "glm_moe_dsa")},
    "deepseek_v4": "its compressed keys have positions counted from the first token, whatever rotates them",
}
"""Model types that use positions outside their rotation too, and how, as the end of a sentence."""


def rotary_modules(root: nn.Module) -> list[str]:
    """Return the paths below `root` of the modules that own rotary frequencies and have a standard name."""
    paths = [path for path, module in module_paths(root) if inv_freq_names(module)]
    return [path for path in paths if path.rsplit(".", 1)[-1] in ("rotary_emb", "pos_emb")]


_MODALITIES = (
    "acoustic_tokenizer_encoder", "audio_tower", "embed_audio", "embed_tokens_extend", "embed_vision", "encoder",
    "multi_modal_projector", "pos_emb", "projector", "semantic_tokenizer_encoder", "time_embedding", "vision_embedder",
    "vision_model", "vision_tower", "visual", "word_timestamp_encoder",
)  # fmt: skip
"""Names of the towers of other modalities, which keep their positions."""

register(
    Family(
        name="rotary",
        summary="every model with a standard rotary module: Llama, Mistral, Qwen, Gemma, Cohere, GLM, ModernBERT, ...",
        rotary=rotary_modules,
        attention="layers.*.self_attn|attn|attention|self_attention",
        attention_proved=ATTENTION_PROVED,
        attention_refused=ATTENTION_REFUSED,
        turning_refused=TURNING_REFUSED,
        rotates=ROTATES,
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
        summary="DBRX: rotary, attention in one block with its norms, causal",
        model_types=("dbrx",),
        rotary=rotary_modules,
        attention="blocks.*.norm_attn_norm.attn",
        attention_proved=ATTENTION_PROVED,
        attention_refused=ATTENTION_REFUSED,
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
        attention_refused=ATTENTION_REFUSED,
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
        attention_refused=ATTENTION_REFUSED,
    )
)
register(
    Family(
        name="t5gemma",
        summary="T5Gemma: rotary in encoder and decoder",
        model_types=("t5gemma",),
        rotary=rotary_modules,
        attention_proved=ATTENTION_PROVED,
        attention_refused=ATTENTION_REFUSED,
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
        attention_refused=ATTENTION_REFUSED,
        stacks=(
            StackSpec("encoder", "encoder.text_model.layers.*.self_attn", entry="encoder"),
            StackSpec("decoder", "decoder.layers.*.self_attn", entry="decoder"),
        ),
        kept=("encoder.vision_tower",),
    )
)
