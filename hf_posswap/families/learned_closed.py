"""Encoders whose position table can be swapped, and whose attention takes no scheme: it is code of their own.

What is native inside attention besides (DeBERTa's disentangled part) stays.
"""

from __future__ import annotations

from typing import Any

from hf_posswap.families.base import Family, StackSpec, TableSpec, register
from hf_posswap.families.own import OwnAttention


def is_decoder(config: Any) -> bool:
    """Return whether `config` makes the encoder a decoder."""
    return bool(getattr(config, "is_decoder", False))


_OWN = OwnAttention(causal=is_decoder)
_TABLE = TableSpec("embeddings.position_embeddings", buffers=("embeddings.position_ids", "embeddings.token_type_ids"))

register(
    Family(
        name="megatron-bert",
        summary="Megatron-BERT, RemBERT, ConvBERT: learned table, encoder (or decoder by config)",
        model_types=("megatron-bert", "rembert", "convbert"),
        stacks=(StackSpec("", "encoder.layer.*.attention.self", table=_TABLE, own=_OWN),),
    )
)
register(
    Family(
        name="deberta",
        summary="DeBERTa of both versions: learned table, where it has one, and relative positions that stay, encoder",
        model_types=("deberta", "deberta-v2"),
        stacks=(StackSpec("", "encoder.layer.*.attention.self", table=_TABLE, own=_OWN),),
    )
)
register(
    Family(
        name="big_bird",
        summary="BigBird: learned table, encoder that attends to blocks (or decoder by config)",
        model_types=("big_bird",),
        stacks=(StackSpec("", "encoder.layer.*.attention", table=_TABLE, own=_OWN),),
    )
)
register(
    Family(
        name="squeezebert",
        summary="SqueezeBERT: learned table, encoder",
        model_types=("squeezebert",),
        stacks=(StackSpec("", "encoder.layers.*.attention", table=_TABLE, own=_OWN),),
    )
)
