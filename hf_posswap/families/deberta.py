"""DeBERTa of both versions: a learned table, where it has one, and a disentangled relative part inside attention."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_posswap.families.attention_traits import AttentionTraits, RelativePart
from hf_posswap.families.base import Family, StackSpec, TableSpec, register


def _deberta(module: nn.Module) -> type | str:
    from hf_posswap.families.interfaces.deberta import DebertaInterface, DebertaV2Interface
    from hf_posswap.families.interfaces.fitting import fitting

    return fitting(module, DebertaInterface, DebertaV2Interface)


def _talks(config: Any) -> str | None:
    """Return why no scheme fits inside attention whose heads mix their scores, if the config says so."""
    if not getattr(config, "talking_head", False):
        return None
    return (
        "its config says talking_head=True: its heads mix their scores, which the AttentionInterface does not support. "
        "What works: sinusoidal, learned"
    )


def _has_no_table(config: Any) -> bool:
    return not getattr(config, "position_biased_input", True)


_ATTENTION = "encoder.layer.*.attention.self"

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
                table=TableSpec(
                    "embeddings.position_embeddings", buffers=("embeddings.position_ids",), absent=_has_no_table
                ),
                causal=False,
                traits=AttentionTraits(
                    _deberta,
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
