"""Decoders whose attention lacks the interface: with a table (GPT-Neo, GPT, XGLM), rotary, or with ALiBi inside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from hf_posswap.compat.transformers_attention import attends_by_interface
from hf_posswap.families.attention_traits import AttentionTraits, NativeScheme
from hf_posswap.families.base import Family, PositionSource, StackSpec, TableSpec, register
from hf_posswap.families.rotary import rotary_modules


def _gpt_neo(module: nn.Module) -> type | str:
    from hf_posswap.families.interfaces.fitting import fitting
    from hf_posswap.families.interfaces.gpt_neo import GPTNeoInterface

    return fitting(module, GPTNeoInterface)


def _openai(module: nn.Module) -> type | str:
    from hf_posswap.families.interfaces.fitting import fitting
    from hf_posswap.families.interfaces.openai import OpenAIGPTInterface

    return fitting(module, OpenAIGPTInterface)


def _xglm(module: nn.Module) -> type | str:
    from hf_posswap.families.interfaces.bart_like import XGLMInterface
    from hf_posswap.families.interfaces.fitting import fitting

    return fitting(module, XGLMInterface)


def _gptj(module: nn.Module) -> type | str:
    if attends_by_interface(type(module)):  # since 5.24
        return type(module)
    from hf_posswap.families.interfaces.fitting import fitting
    from hf_posswap.families.interfaces.gptj import GPTJInterface

    return fitting(module, GPTJInterface)


def _codegen(module: nn.Module) -> type | str:
    if attends_by_interface(type(module)):  # since 5.24
        return type(module)
    from hf_posswap.families.interfaces.codegen import CodeGenInterface
    from hf_posswap.families.interfaces.fitting import fitting

    return fitting(module, CodeGenInterface)


def _bloom(module: nn.Module) -> type | str:
    from hf_posswap.families.interfaces.bloom import BloomInterface
    from hf_posswap.families.interfaces.fitting import fitting

    if module.pretraining_tp > 1 and module.slow_but_exact:  # type: ignore[operator]
        return "its config says slow_but_exact with pretraining_tp > 1, which transformers itself cannot run."
    return fitting(module, BloomInterface)


def _mpt(module: nn.Module) -> type | str:
    from hf_posswap.families.interfaces.fitting import fitting
    from hf_posswap.families.interfaces.mpt import MptInterface

    return fitting(module, MptInterface)


def _falcon(module: nn.Module) -> type | str:
    from hf_posswap.families.interfaces.falcon import FalconInterface
    from hf_posswap.families.interfaces.fitting import fitting

    return fitting(module, FalconInterface)


def _interleaved(config: Any) -> NativeScheme:
    """Return the rotation of GPT-J and CodeGen: its base is fixed."""
    width = config.hidden_size // config.num_attention_heads
    return {"name": "rope", "base": 10000.0, "partial": (config.rotary_dim or width) / width, "layout": "interleaved"}


def _alibi(config: Any) -> NativeScheme:
    return {"name": "alibi"}


def _scaled_alibi(config: Any) -> NativeScheme | None:
    """Return Falcon's ALiBi if it has one: its bias is scaled with the scores."""
    width = config.hidden_size // config.num_attention_heads
    return {"name": "alibi", "interpolation": width**0.5} if config.alibi else None


_ROTARY_INSIDE = AttentionTraits(positions=_interleaved, scheme="rope", angles="rotary_emb")
"""Of GPT-J and CodeGen: before 5.24 each attention module has its angles, since then the base model."""


def _counted_by_falcon(config: Any) -> PositionSource:
    return "mask" if config.alibi else "arange"


def _rotary_falcon(root: Any) -> list[str]:
    return [] if root.config.alibi else rotary_modules(root)


register(
    Family(
        name="gpt_neo",
        summary="GPT-Neo: learned table, causal, every other layer sees a window",
        model_types=("gpt_neo",),
        stacks=(
            StackSpec("", "h.*.attn.attention", table=TableSpec("wpe"), traits=AttentionTraits(_gpt_neo, ends=True)),
        ),
    )
)
register(
    Family(
        name="openai-gpt",
        summary="GPT, the first: learned table, causal, no cache",
        model_types=("openai-gpt",),
        stacks=(
            StackSpec(
                "",
                "h.*.attn",
                table=TableSpec("positions_embed", buffers=("position_ids",)),
                traits=AttentionTraits(_openai, ends=True),
            ),
        ),
    )
)
register(
    Family(
        name="xglm",
        summary="XGLM: a sinusoidal table that it computes, causal",
        model_types=("xglm",),
        stacks=(
            StackSpec(
                "",
                "layers.*.self_attn",
                table=TableSpec("embed_positions", offset=2, kind="sinusoidal", computed=True),
                traits=AttentionTraits(_xglm),
            ),
        ),
    )
)
register(
    Family(
        name="ctrl",
        summary="CTRL: a sinusoidal table that it computes, causal",
        model_types=("ctrl",),
        stacks=(
            StackSpec(
                "",
                "h.*.multi_head_attention",
                table=TableSpec("pos_encoding", kind="sinusoidal", computed=True),
            ),
        ),
    )
)
register(
    Family(
        name="gptj",
        summary="GPT-J: interleaved rotary positions inside attention, causal",
        model_types=("gptj",),
        stacks=(StackSpec("", "h.*.attn", traits=replace(_ROTARY_INSIDE, interface=_gptj)),),
    )
)
register(
    Family(
        name="codegen",
        summary="CodeGen: interleaved rotary positions inside attention, causal",
        model_types=("codegen",),
        stacks=(StackSpec("", "h.*.attn", traits=replace(_ROTARY_INSIDE, interface=_codegen)),),
    )
)
register(
    Family(
        name="bloom",
        summary="BLOOM: ALiBi, causal",
        model_types=("bloom",),
        stacks=(
            StackSpec(
                "",
                "h.*.self_attention",
                traits=AttentionTraits(_bloom, positions=_alibi, scheme="alibi", length_name=None),
                position_source="mask",
            ),
        ),
    )
)
register(
    Family(
        name="mpt",
        summary="MPT: ALiBi, causal",
        model_types=("mpt",),
        stacks=(
            StackSpec(
                "",
                "blocks.*.attn",
                traits=AttentionTraits(
                    _mpt, positions=_alibi, scheme="alibi", length_name="max_seq_len", eager_masks=True
                ),
                position_source="relative",
            ),
        ),
    )
)
register(
    Family(
        name="falcon",
        summary="Falcon: rotary or ALiBi, causal",
        model_types=("falcon",),
        rotary=_rotary_falcon,
        kept=("rotary_emb",),
        stacks=(
            StackSpec(
                "",
                "h.*.self_attention",
                traits=AttentionTraits(_falcon, positions=_scaled_alibi, scheme="alibi", switch=("", "use_alibi")),
                position_source=_counted_by_falcon,
            ),
        ),
    )
)
