"""Encoders with a learned absolute table, and no other position mechanism; most can be decoders by their config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from hf_posswap.families.attention_traits import AttentionTraits
from hf_posswap.families.base import Family, StackSpec, TableSpec, register

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_TABLE = "embeddings.position_embeddings"
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
_PADDED = TableSpec(_TABLE, offset="padding", config_counts_offset=True, buffers=_BUFFERS)


def is_absolute_esm(config: PreTrainedConfig) -> bool:
    """Return whether `config` is of an ESM with a table; others of the same type are rotary."""
    return config.model_type == "esm" and getattr(config, "position_embedding_type", "absolute") == "absolute"


def _layoutlm(module: nn.Module) -> type | str:
    from hf_posswap.families.interfaces.fitting import fitting
    from hf_posswap.families.interfaces.layoutlm import LayoutLMInterface

    return fitting(module, LayoutLMInterface)


register(
    Family(
        name="bert",
        summary="BERT, ELECTRA, ERNIE, MobileBERT, RoCBert and kin: learned table, encoder (or decoder by config)",
        model_types=("bert", "bert-generation", "electra", "ernie", "mobilebert", "roc_bert"),
        table=TableSpec(_TABLE, buffers=_BUFFERS),
        attention="encoder.layer.*.attention.self",
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
                "encoder.layer.*.attention.self",
                table=TableSpec(_TABLE, buffers=("embeddings.position_ids",)),
                causal=False,
                traits=AttentionTraits(_layoutlm),
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
        attention="encoder.layer.*.attention.self",
    )
)
register(
    Family(
        name="esm",
        summary="ESM-1: learned table whose positions skip padding, encoder",
        matches=is_absolute_esm,
        table=_PADDED,
        position_source="input_ids",
        attention="encoder.layer.*.attention.self",
    )
)
register(
    Family(
        name="distilbert",
        summary="DistilBERT: learned table, encoder",
        model_types=("distilbert",),
        table=TableSpec(_TABLE, buffers=_BUFFERS),
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
                table=TableSpec(_TABLE, buffers=_BUFFERS),
                layers_share=True,
            ),
        ),
    )
)
