"""Encoder-decoders, and decoders cut from them: with a position table in each stack, or T5's learned bias.

Cross-attention uses no positions and stays unchanged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_posswap.compat.transformers_attention import attends_by_interface
from hf_posswap.families.base import AttentionTraits, Family, NativeScheme, StackSpec, TableSpec, register
from hf_posswap.families.encoders import sees_blocks
from hf_posswap.families.interfaces.base import ChosenInterface, fitting

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _prompts(config: PreTrainedConfig) -> str | None:
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


def decoder_alone(**table: object) -> tuple[StackSpec]:
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
        stacks=tuple(
            replace(
                stack,
                traits=AttentionTraits(ChosenInterface("bart_like", ("MvpInterface",)), closed=_prompts),
            )
            for stack in stacks(offset=2)
        ),
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
                traits=AttentionTraits(ChosenInterface("bert_like", ("BigBirdPegasusInterface",)), closed=sees_blocks),
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
        stacks=(
            replace(
                *decoder_alone(offset=2),
                traits=AttentionTraits(ChosenInterface("bart_like", ("TrOCRInterface",))),
            ),
        ),
    )
)


def _buckets(config: PreTrainedConfig) -> NativeScheme:
    return {
        "name": "t5",
        "num_buckets": config.relative_attention_num_buckets,
        "max_distance": config.relative_attention_max_distance,
    }


def _t5(module: nn.Module) -> type | str:
    """Return the class of `module`, or an equal one with the interface if transformers has none yet."""
    if attends_by_interface(type(module)):
        return type(module)
    if type(module).__name__ == "SwitchTransformersAttention":
        return "this release of transformers gives its bias only to the first layer: nothing can be put inside."
    from hf_posswap.families.interfaces.t5 import LongT5Interface, MT5Interface, T5Interface, UMT5Interface

    return fitting(module, T5Interface, MT5Interface, UMT5Interface, LongT5Interface)


def _stack(name: str) -> StackSpec:
    attention = f"{name}.block.*.layer.0.SelfAttention"
    traits = AttentionTraits(
        _t5,
        positions=_buckets,
        scheme="t5",
        made_from=f"{attention}.relative_attention_bias",
        length_name=None,
        length=512,
    )
    return StackSpec(name, attention, entry=name, causal=name == "decoder", traits=traits, position_source="relative")


register(
    Family(
        name="t5",
        summary="T5, mT5, UMT5, Switch: a learned bias for each bucket of distances, in encoder and decoder",
        model_types=("t5", "mt5", "umt5", "switch_transformers"),
        stacks=(_stack("encoder"), _stack("decoder")),
    )
)
register(
    Family(
        name="longt5",
        summary="LongT5's decoder: a learned bias for each bucket of distances; the encoder's blocks keep theirs",
        model_types=("longt5",),
        stacks=(_stack("decoder"),),
        note="The encoder attends to blocks with custom code and keeps its bias.",
    )
)
# Its attention is custom code: its tables can be replaced, and nothing can be put inside attention.
register(
    Family(
        name="led",
        summary="LED: a learned table in the encoder, which sees windows, and in the decoder",
        model_types=("led",),
        stacks=tuple(
            replace(
                stack,
                table=TableSpec(
                    f"{stack.name}.embed_positions",
                    config_name=f"max_{stack.name}_position_embeddings",
                    padded_to="attention_window" if stack.name == "encoder" else "",
                ),
            )
            for stack in stacks()
        ),
    )
)
