"""Whether a scheme can be put inside the attention of a rotary model: known by trial, for each model type.

Model types are those of the part of the config that has the rope parameters: a text tower's own, not the whole's.
"""

from __future__ import annotations

ATTENTION_PROVED = frozenset(
    """
    apertus arcee aria_text bamba beam bitnet cohere cohere_compass_text cwm dbrx diffllama doge dots1
    emu3_text_model ernie4_5 ernie4_5_moe esmc eurobert falcon_h1 flex_olmo gemma gemma2 gemma3_text gemma4_text
    gemma4_unified_text glm glm4 glm4_moe gpt_neox gpt_oss granite granitemoe granitemoehybrid granitemoeshared
    gte helium hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe jina_embeddings_v3 kolibri1 laguna lfm2
    lfm2_moe lfm3 llama mellum mimo_v2_flash minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral
    mllama_text_model modernbert modernbert-decoder moshi nemotron neomme nomic_bert olmo olmo2 olmo3
    olmo_hybrid olmoe persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text
    qwen3_5_text qwen3_moe qwen3_next seed_oss solar_open stablelm starcoder2 t5_gemma_module ultrabert
    vaultgemma zamba2 zaya
    """.split()
)
"""Model types in which RoPE re-applied inside attention equals the native model exactly, with and without a cache; a
slow test runs every class of them."""

_NOT_ALL = "some of its layers do not rotate at all, and a scheme inside attention would give those one too"
_LATENT = "its latent attention rotates a part of each head that it keeps apart"
_LINEAR = "some of its layers have linear attention"

ATTENTION_REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "afmoe",
            "cohere2",
            "cohere2_moe",
            "exaone4",
            "exaone_moe",
            "flint",
            "llama4_text",
            "qwen4_exp_text",
            "smollm3",
        ),
        _NOT_ALL,
    ),
    **dict.fromkeys(
        (
            "axk1",
            "axk2",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "dots3_note_text",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "hy_v4",
            "longcat_flash",
            "minicpm3",
            "youtu",
        ),
        _LATENT,
    ),
    **dict.fromkeys(("bailing_hybrid", "minimax"), _LINEAR),
    **dict.fromkeys(
        ("hunyuan_v1_dense", "hunyuan_v1_moe"), "its queries and keys are normalised after they were rotated"
    ),
    "deepseek_v4": "it attends to keys of several tokens that it has pressed into one",
    "gemma3n_text": "some of its layers take the keys of others, which are rotated already",
    "gpt_neox_japanese": "its attention does not go through transformers' AttentionInterface",
    "hrm_text": "its layers run several times in each forward, on keys of their own",
    "nanochat": "its pairs turn the other way round",
    "t5gemma2_decoder": "its self-attention and its cross-attention are one",
    "t5gemma2_text": "its decoder's self-attention and cross-attention are one",
    "voxtral_realtime_text": "it cannot be run on text alone, so nothing is proved of it",
}
"""Model types of which it is known why a scheme cannot be put inside, as the end of a sentence."""

MOVED_BY_SHIFT: dict[str, str] = {
    **{name: ATTENTION_REFUSED[name] for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "deepseek_v4")},
    **{name: ATTENTION_REFUSED[name] for name in ("t5gemma2_decoder", "t5gemma2_text")},
    "deepseek_v32": "older releases of transformers compare its position ids with places counted from the first token",
    "switch_transformers": "each of its experts takes so many tokens of a sequence, and padding takes their room",
}
"""Model types whose attention is moved by a shift of all positions under any rotation, and why."""

POSITIONS_ELSEWHERE: dict[str, str] = {
    "deepseek_v32": MOVED_BY_SHIFT["deepseek_v32"],
    "deepseek_v4": "its pressed keys stand at places that are counted from the first token, whatever turns them",
}
"""Model types that know positions also without their rotation, and how, as the end of a sentence."""
