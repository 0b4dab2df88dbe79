"""Decoders: with a table, rotary positions inside attention (GPT-J, CodeGen), or ALiBi (BLOOM, MPT, Falcon).

The attention of most lacks transformers' AttentionInterface; `interfaces` has classes that have it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from hf_posswap.compat.transformers_attention import attends_by_interface
from hf_posswap.families.base import (
    AttentionTraits,
    Family,
    NativeScheme,
    PositionSource,
    StackSpec,
    TableSpec,
    register,
)
from hf_posswap.families.interfaces.base import ChosenInterface, fitting
from hf_posswap.families.rotary import rotary_modules

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

register(
    Family(
        name="gpt2",
        summary="GPT-2, GPT-BigCode: learned table, causal",
        model_types=("gpt2", "gpt_bigcode"),
        table=TableSpec("wpe"),
        attention="h.*.attn",
    )
)
register(
    Family(
        name="opt",
        summary="OPT: learned table with two extra rows, causal",
        model_types=("opt",),
        entry="decoder",
        table=TableSpec("decoder.embed_positions", offset=2),
        attention="decoder.layers.*.self_attn",
        position_source="mask",
    )
)
register(
    Family(
        name="biogpt",
        summary="BioGPT: learned table with two extra rows, causal",
        model_types=("biogpt",),
        table=TableSpec("embed_positions", offset=2),
        attention="layers.*.self_attn",
    )
)


def _rotary_inside(module: nn.Module) -> type | str:
    if attends_by_interface(type(module)):  # since 5.24
        return type(module)
    from hf_posswap.families.interfaces.gptj import CodeGenInterface, GPTJInterface

    return fitting(module, GPTJInterface, CodeGenInterface)


def _bloom(module: nn.Module) -> type | str:
    if module.pretraining_tp > 1 and module.slow_but_exact:  # type: ignore[operator]
        return "its config says slow_but_exact with pretraining_tp > 1, which transformers itself cannot run."
    from hf_posswap.families.interfaces.bloom import BloomInterface

    return fitting(module, BloomInterface)


def _interleaved(config: PreTrainedConfig) -> NativeScheme:
    """Return the rotation of GPT-J and CodeGen: its base is fixed."""
    width = config.hidden_size // config.num_attention_heads
    return {"name": "rope", "base": 10000.0, "partial": (config.rotary_dim or width) / width, "layout": "interleaved"}


def _alibi(config: PreTrainedConfig) -> NativeScheme:
    return {"name": "alibi"}


def _scaled_alibi(config: PreTrainedConfig) -> NativeScheme | None:
    """Return Falcon's ALiBi if it has one: its bias is scaled with the scores."""
    width = config.hidden_size // config.num_attention_heads
    return {"name": "alibi", "interpolation": width**0.5} if config.alibi else None


_ROTARY_INSIDE = AttentionTraits(
    _rotary_inside, positions=_interleaved, scheme="rope", angles="rotary_emb", bounded=True
)
"""Of GPT-J and CodeGen: before 5.24 each attention module has its angles, since then the base model."""


def _counted_by_falcon(config: PreTrainedConfig) -> PositionSource:
    return "mask" if config.alibi else "arange"


def _rotary_falcon(root: Any) -> list[str]:
    return [] if root.config.alibi else rotary_modules(root)


register(
    Family(
        name="gpt_neo",
        summary="GPT-Neo: learned table, causal, every other layer sees a window",
        model_types=("gpt_neo",),
        stacks=(
            StackSpec(
                "",
                "h.*.attn.attention",
                table=TableSpec("wpe"),
                traits=AttentionTraits(ChosenInterface("gpt_neo", ("GPTNeoInterface",)), ends=True),
            ),
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
                traits=AttentionTraits(ChosenInterface("openai", ("OpenAIGPTInterface",)), ends=True),
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
                traits=AttentionTraits(ChosenInterface("bart_like", ("XGLMInterface",))),
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
        stacks=(StackSpec("", "h.*.attn", traits=_ROTARY_INSIDE),),
    )
)
register(
    Family(
        name="codegen",
        summary="CodeGen: interleaved rotary positions inside attention, causal",
        model_types=("codegen",),
        stacks=(StackSpec("", "h.*.attn", traits=_ROTARY_INSIDE),),
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
                    ChosenInterface("mpt", ("MptInterface",)),
                    positions=_alibi,
                    scheme="alibi",
                    length_name="max_seq_len",
                    bounded=True,
                    eager_masks=True,
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
                traits=AttentionTraits(
                    ChosenInterface("falcon", ("FalconInterface",)),
                    positions=_scaled_alibi,
                    scheme="alibi",
                    switch=("", "use_alibi"),
                ),
                position_source=_counted_by_falcon,
            ),
        ),
    )
)
