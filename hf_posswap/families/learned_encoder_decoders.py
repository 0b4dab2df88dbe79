"""Encoder-decoders with a position table in each stack, learned or sinusoidal, and decoders cut from them.

Cross-attention knows no positions and stays as it is.
"""

from __future__ import annotations

from typing import Any

from hf_posswap.families.base import Family, StackSpec, TableSpec, register


def stacks(**table: Any) -> tuple[StackSpec, StackSpec]:
    """Return an encoder and a decoder laid out as BART's, each with a table: the arguments are those of `TableSpec`."""
    return (
        StackSpec(
            name="encoder",
            attention="encoder.layers.*.self_attn",
            entry="encoder",
            table=TableSpec("encoder.embed_positions", **table),
            heads="encoder_attention_heads",
        ),
        StackSpec(
            name="decoder",
            attention="decoder.layers.*.self_attn",
            entry="decoder",
            table=TableSpec("decoder.embed_positions", **table),
            heads="decoder_attention_heads",
        ),
    )


register(
    Family(
        name="bart",
        summary="BART, mBART, PLBart: a learned table with two extra rows in encoder and decoder",
        model_types=("bart", "mbart", "plbart"),
        stacks=stacks(offset=2),
    )
)
register(
    Family(
        name="blenderbot",
        summary="Blenderbot: a learned table in encoder and decoder",
        model_types=("blenderbot", "blenderbot-small"),
        stacks=stacks(),
    )
)
