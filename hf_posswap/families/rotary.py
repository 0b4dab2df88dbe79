"""Families with a standard rotary module, most matched by rule: rope parameters in the config, layers in `layers`.

`locate` refuses a model that deviates from transformers' conventions; it never guesses.
"""

from __future__ import annotations

from torch import nn

from hf_posswap.families.base import Family, StackSpec, register
from hf_posswap.families.modules import paths_of
from hf_posswap.families.rope_config import has_rope, inv_freq_names
from hf_posswap.families.rotary_compatibility import ATTENTION_PROVED, ATTENTION_REFUSED, ROTATES, TURNING_REFUSED


def rotary_modules(root: nn.Module) -> list[str]:
    """Return the paths below `root` of the modules that own rotary frequencies and have a standard name."""
    paths = paths_of(root, lambda module: bool(inv_freq_names(module)))
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
