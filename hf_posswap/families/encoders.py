"""Encoders with a learned table, RoFormer, and DeBERTa; most can be decoders by their config.

The attention of many lacks transformers' AttentionInterface; `interfaces` has classes that have it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hf_posswap.families.base import AttentionTraits, Family, NativeScheme, RelativePart, StackSpec, TableSpec, register
from hf_posswap.families.interfaces.base import ChosenInterface

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


_ATTENTION = "encoder.layer.*.attention.self"
_CROSS = "encoder.layer.*.crossattention.self"
_TABLE = "embeddings.position_embeddings"
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
_LEARNED = TableSpec(_TABLE, buffers=_BUFFERS)
_PADDED = TableSpec(_TABLE, offset="padding", config_counts_offset=True, buffers=_BUFFERS)


def is_absolute_esm(config: PreTrainedConfig) -> bool:
    """Return whether `config` is of an ESM with a table; others of the same type are rotary."""
    return config.model_type == "esm" and getattr(config, "position_embedding_type", "absolute") == "absolute"


register(
    Family(
        name="bert",
        summary="BERT, ELECTRA, ERNIE, MobileBERT, RoCBert and kin: learned table, encoder (or decoder by config)",
        model_types=("bert", "bert-generation", "electra", "ernie", "mobilebert", "roc_bert"),
        table=_LEARNED,
        attention=_ATTENTION,
    )
)
register(
    Family(
        name="layoutlm",
        summary="LayoutLM: learned table, encoder; the tables of places on the page stay",
        model_types=("layoutlm",),
        stacks=(
            StackSpec(
                "",
                _ATTENTION,
                table=TableSpec(_TABLE, buffers=("embeddings.position_ids",)),
                causal=False,
                traits=AttentionTraits(ChosenInterface("layoutlm", ("LayoutLMInterface",))),
            ),
        ),
        kept=tuple(f"embeddings.{name}_position_embeddings" for name in "xyhw"),
        note="Places on the page (bbox) keep their tables.",
    )
)
register(
    Family(
        name="roberta",
        summary="RoBERTa, XLM-R, CamemBERT, data2vec: learned table whose positions skip padding, encoder (or decoder)",
        model_types=(
            "roberta",
            "roberta-prelayernorm",
            "xlm-roberta",
            "xlm-roberta-xl",
            "camembert",
            "data2vec-text",
            "xmod",
        ),
        table=_PADDED,
        position_source="input_ids",
        attention=_ATTENTION,
    )
)
register(
    Family(
        name="esm",
        summary="ESM-1: learned table whose positions skip padding, encoder",
        matches=is_absolute_esm,
        table=_PADDED,
        position_source="input_ids",
        attention=_ATTENTION,
    )
)
register(
    Family(
        name="distilbert",
        summary="DistilBERT: learned table, encoder",
        model_types=("distilbert",),
        table=_LEARNED,
        attention="transformer.layer.*.attention",
    )
)
register(
    Family(
        name="albert",
        summary="ALBERT: learned table, encoder whose layers share their weights",
        model_types=("albert",),
        stacks=(
            StackSpec(
                name="",
                attention="encoder.albert_layer_groups.*.albert_layers.*.attention",
                table=_LEARNED,
                layers_share=True,
            ),
        ),
    )
)


def is_decoder(config: PreTrainedConfig) -> bool:
    """Return whether `config` makes the encoder a decoder."""
    return bool(getattr(config, "is_decoder", False))


_BERT_LIKE = ChosenInterface(
    "bert_like", ("BigBirdInterface", "MegatronBertInterface", "RemBertInterface"), may_decode=True
)


def _attending_heads(config: PreTrainedConfig) -> tuple[int, int]:
    """Return how many heads of ConvBERT attend, and their width; the others convolve."""
    heads = max(1, config.num_attention_heads // config.head_ratio)
    return heads, config.hidden_size // heads // 2


def sees_blocks(config: PreTrainedConfig) -> str | None:
    """Return why no scheme fits inside block-sparse attention, if the config selects it."""
    if config.attention_type == "original_full":
        return None
    return (
        f"its config says attention_type={config.attention_type!r}: its code chooses blocks of keys. "
        "What works: the same model loaded with attention_type='original_full'"
    )


register(
    Family(
        name="megatron-bert",
        summary="Megatron-BERT, RemBERT: learned table, encoder (or decoder by config)",
        model_types=("megatron-bert", "rembert"),
        stacks=(
            StackSpec(
                "",
                _ATTENTION,
                table=_LEARNED,
                traits=AttentionTraits(_BERT_LIKE, causal=is_decoder),
                cross=_CROSS,
            ),
        ),
    )
)
register(
    Family(
        name="convbert",
        summary="ConvBERT: learned table, encoder, half of whose heads convolve",
        model_types=("convbert",),
        stacks=(
            StackSpec(
                "",
                _ATTENTION,
                table=_LEARNED,
                traits=AttentionTraits(
                    ChosenInterface("convbert", ("ConvBertInterface",)),
                    causal=is_decoder,
                    heads=_attending_heads,
                ),
                cross=_CROSS,
            ),
        ),
    )
)
register(
    Family(
        name="big_bird",
        summary="BigBird: learned table, encoder that attends to blocks, or to all (or decoder by config)",
        model_types=("big_bird",),
        stacks=(
            StackSpec(
                "",
                _ATTENTION,
                table=replace(_LEARNED, padded_to="block_size"),
                traits=AttentionTraits(_BERT_LIKE, causal=is_decoder, closed=sees_blocks),
                cross=_CROSS,
            ),
        ),
    )
)
register(
    Family(
        name="squeezebert",
        summary="SqueezeBERT: learned table, encoder",
        model_types=("squeezebert",),
        stacks=(
            StackSpec(
                "",
                "encoder.layers.*.attention",
                table=_LEARNED,
                traits=AttentionTraits(ChosenInterface("squeezebert", ("SqueezeBertInterface",)), causal=is_decoder),
            ),
        ),
    )
)


def _thirty_two_buckets(config: PreTrainedConfig) -> NativeScheme:
    """Return MPNet's bias: whatever its config says, its code has 32 buckets."""
    return {"name": "t5", "num_buckets": 32, "max_distance": 128}


def _interleaved(config: PreTrainedConfig) -> NativeScheme:
    return {"name": "rope", "base": 10000.0, "partial": 1.0, "layout": "interleaved"}


register(
    Family(
        name="mpnet",
        summary="MPNet: learned table whose positions skip padding, and a T5-like bias, encoder",
        model_types=("mpnet",),
        stacks=(
            StackSpec(
                "",
                "encoder.layer.*.attention.attn",
                table=TableSpec(
                    _TABLE,
                    offset="padding",
                    config_counts_offset=True,
                    buffers=("embeddings.position_ids",),
                ),
                causal=False,
                traits=AttentionTraits(
                    ChosenInterface("mpnet", ("MPNetInterface",)),
                    positions=_thirty_two_buckets,
                    scheme="t5",
                    made_from="encoder.relative_attention_bias",
                    position_source="relative",
                ),
                position_source="input_ids",
            ),
        ),
    )
)
register(
    Family(
        name="roformer",
        summary="RoFormer: interleaved rotary positions inside attention, encoder (or decoder by config)",
        model_types=("roformer",),
        kept=("encoder.embed_positions",),
        stacks=(
            StackSpec(
                "",
                _ATTENTION,
                traits=AttentionTraits(
                    ChosenInterface("roformer", ("RoFormerInterface",), may_decode=True),
                    positions=_interleaved,
                    scheme="rope",
                    made_from="encoder.embed_positions",
                    causal=is_decoder,
                    bounded=True,
                ),
                position_source="relative",
                cross=_CROSS,
            ),
        ),
    )
)


def _talks(config: PreTrainedConfig) -> str | None:
    """Return why no scheme fits inside attention whose heads mix their scores, if the config says so."""
    if not getattr(config, "talking_head", False):
        return None
    return (
        "its config says talking_head=True: its heads mix their scores, which the AttentionInterface does not support. "
        "What works: sinusoidal, learned"
    )


def _has_no_table(config: PreTrainedConfig) -> bool:
    return not getattr(config, "position_biased_input", True)


register(
    Family(
        name="deberta",
        summary="DeBERTa of both versions: learned table, where it has one, and a relative part that stays or goes, "
        "encoder",
        model_types=("deberta", "deberta-v2"),
        stacks=(
            StackSpec(
                "",
                _ATTENTION,
                table=TableSpec(_TABLE, buffers=("embeddings.position_ids",), absent=_has_no_table),
                causal=False,
                traits=AttentionTraits(
                    ChosenInterface(
                        "deberta",
                        ("DebertaInterface", "DebertaV2Interface"),
                    ),
                    closed=_talks,
                    relative=RelativePart(
                        config_name="relative_attention",
                        switches=("encoder", _ATTENTION),
                        weights=(
                            "encoder.rel_embeddings",
                            "encoder.LayerNorm",
                            *(f"{_ATTENTION}.{name}" for name in ("pos_proj", "pos_q_proj")),
                            *(f"{_ATTENTION}.{name}" for name in ("pos_key_proj", "pos_query_proj")),
                        ),
                    ),
                ),
            ),
        ),
    )
)


# The attention of these is custom code, without the AttentionInterface: their table can be replaced, but nothing can be
# put inside attention, so swaps that need it are refused.


def _xlm_causal(config: PreTrainedConfig) -> bool:
    return bool(getattr(config, "causal", False))


register(
    Family(
        name="xlm",
        summary="XLM, FlauBERT: learned table, encoder (or causal by config)",
        model_types=("xlm", "flaubert"),
        stacks=(
            StackSpec(
                "",
                "attentions.*",
                table=TableSpec("position_embeddings", buffers=("position_ids",)),
                traits=AttentionTraits(causal=_xlm_causal),
            ),
        ),
    )
)
register(
    Family(
        name="longformer",
        summary="Longformer: learned table whose positions skip padding, encoder that sees windows",
        model_types=("longformer",),
        stacks=(
            StackSpec(
                "",
                _ATTENTION,
                table=TableSpec(
                    _TABLE, offset="padding", config_counts_offset=True, embeds_padded_to="attention_window"
                ),
                position_source="input_ids",
                causal=False,
            ),
        ),
    )
)
register(
    Family(
        name="tapas",
        summary="TAPAS: learned table, encoder; rows and columns of its tables are no positions, and stay",
        model_types=("tapas",),
        stacks=(StackSpec("", _ATTENTION, table=TableSpec(_TABLE), causal=False),),
    )
)
