"""Models with a learned table whose attention is custom code, without transformers' AttentionInterface.

Their table can be replaced; nothing can be put inside attention, so swaps that need it are refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_posswap.families.attention_traits import AttentionTraits
from hf_posswap.families.base import Family, StackSpec, TableSpec, register
from hf_posswap.families.learned_encoder_decoders import stacks

_TABLE = "embeddings.position_embeddings"


def _xlm_causal(config: Any) -> bool:
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
                "encoder.layer.*.attention.self",
                table=TableSpec(_TABLE, offset="padding", config_counts_offset=True),
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
        stacks=(StackSpec("", "encoder.layer.*.attention.self", table=TableSpec(_TABLE), causal=False),),
    )
)
register(
    Family(
        name="led",
        summary="LED: a learned table in the encoder, which sees windows, and in the decoder",
        model_types=("led",),
        stacks=tuple(
            replace(stack, table=replace(stack.table, config_name=f"max_{stack.name}_position_embeddings"))
            for stack in stacks()
            if stack.table is not None
        ),
    )
)
