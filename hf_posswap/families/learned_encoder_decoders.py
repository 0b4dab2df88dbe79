"""Encoder-decoders with a position table in each stack, learned or sinusoidal, and decoders cut from them.

Cross-attention uses no positions and stays unchanged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from hf_posswap.families.attention_traits import AttentionTraits
from hf_posswap.families.base import Family, StackSpec, TableSpec, register
from hf_posswap.families.bert_like_no_interface import sees_blocks


def _bart_like(module: nn.Module) -> type | str:
    from hf_posswap.families.interfaces.bart_like import MvpInterface, TrOCRInterface
    from hf_posswap.families.interfaces.fitting import fitting

    return fitting(module, MvpInterface, TrOCRInterface)


def _bigbird_pegasus(module: nn.Module) -> type | str:
    from hf_posswap.families.interfaces.bert_like import BigBirdPegasusInterface
    from hf_posswap.families.interfaces.fitting import fitting

    return fitting(module, BigBirdPegasusInterface)


def _prompts(config: Any) -> str | None:
    """Return why no scheme fits inside attention with prompts, if the config enables them."""
    if not config.use_prompt:
        return None
    return (
        "its config says use_prompt=True: prompts precede the keys and have no positions. What works: use_prompt=False"
    )


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
        model_types=("bart", "mbart", "plbart"),
        stacks=stacks(offset=2),
    )
)
register(
    Family(
        name="mvp",
        summary="MVP: a learned table with two extra rows in encoder and decoder",
        model_types=("mvp",),
        stacks=tuple(replace(stack, traits=AttentionTraits(_bart_like, closed=_prompts)) for stack in stacks(offset=2)),
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
register(
    Family(
        name="bigbird_pegasus",
        summary="BigBird-Pegasus: a learned table in encoder, which attends to blocks or to all, and decoder",
        model_types=("bigbird_pegasus",),
        stacks=(
            replace(
                stacks()[0],
                attention="encoder.layers.*.self_attn.self",
                traits=AttentionTraits(_bigbird_pegasus, closed=sees_blocks),
            ),
            *decoder_alone(),
        ),
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
        stacks=tuple(
            replace(stack, position_source="input_ids")
            for stack in stacks(offset="padding", kind="sinusoidal", computed=True)
        ),
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
        stacks=(replace(*decoder_alone(offset=2), traits=AttentionTraits(_bart_like)),),
    )
)
