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
            causal=False,
        ),
        StackSpec(
            name="decoder",
            attention="decoder.layers.*.self_attn",
            entry="decoder",
            table=TableSpec("decoder.embed_positions", **table),
            heads="decoder_attention_heads",
            causal=True,
        ),
    )


def decoder_alone(**table: Any) -> tuple[StackSpec]:
    """Return the decoder of `stacks`."""
    return (stacks(**table)[1],)


register(
    Family(
        name="bart",
        summary="BART, mBART, PLBart: a learned table with two extra rows in encoder and decoder",
        model_types=("bart", "mbart", "plbart", "mvp"),
        stacks=stacks(offset=2),
    )
)
register(
    Family(
        name="blenderbot",
        summary="Blenderbot, BigBird-Pegasus: a learned table in encoder and decoder",
        model_types=("blenderbot", "blenderbot-small", "bigbird_pegasus"),
        stacks=stacks(),
    )
)
register(
    Family(
        name="marian",
        summary="Marian, Pegasus: a fixed sinusoidal table in encoder and decoder",
        model_types=("marian", "pegasus"),
        stacks=stacks(kind="sinusoidal"),
    )
)
register(
    Family(
        name="m2m_100",
        summary="M2M-100, NLLB-MoE: sinusoids that skip padding, computed in encoder and decoder",
        model_types=("m2m_100", "nllb_moe", "nllb-moe"),
        stacks=stacks(offset="padding", kind="sinusoidal", computed=True),
    )
)
register(
    Family(
        name="whisper",
        summary="Whisper's decoder: a learned table; the encoder hears, and keeps its sinusoids",
        model_types=("whisper",),
        stacks=decoder_alone(config_name="max_target_positions"),
        kept=("encoder.embed_positions",),
    )
)
register(
    Family(
        name="trocr",
        summary="TrOCR's decoder: a learned table with two extra rows",
        model_types=("trocr",),
        stacks=decoder_alone(offset=2),
    )
)
