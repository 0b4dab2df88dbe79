"""Encoders whose attention lacks the interface and has native positions inside: MPNet, RoFormer."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_posswap.compat.transformers_models import masks_the_future
from hf_posswap.families.attention_traits import AttentionTraits, NativeScheme
from hf_posswap.families.base import Family, StackSpec, TableSpec, register
from hf_posswap.families.modules import modeling_module


def _mpnet(module: nn.Module) -> type | str:
    from hf_posswap.families.interfaces.fitting import fitting
    from hf_posswap.families.interfaces.mpnet import MPNetInterface

    return fitting(module, MPNetInterface)


def _roformer(module: nn.Module) -> type | str:
    from hf_posswap.families.interfaces.fitting import fitting
    from hf_posswap.families.interfaces.roformer import RoFormerInterface

    if module.is_decoder and not masks_the_future(modeling_module(module)):
        return "this release of transformers lets such decoders see future tokens: nothing can be put inside."
    return fitting(module, RoFormerInterface)


def _thirty_two_buckets(config: Any) -> NativeScheme:
    """Return MPNet's bias: whatever its config says, its code has 32 buckets."""
    return {"name": "t5", "num_buckets": 32, "max_distance": 128}


def _interleaved(config: Any) -> NativeScheme:
    return {"name": "rope", "base": 10000.0, "partial": 1.0, "layout": "interleaved"}


def _is_decoder(config: Any) -> bool:
    return bool(config.is_decoder)


register(
    Family(
        name="mpnet",
        summary="MPNet: learned table whose positions skip padding, and a T5-like bias, encoder",
        model_types=("mpnet",),
        stacks=(
            StackSpec(
                "",
                "encoder.layer.*.attention.attn",
                table=TableSpec(
                    "embeddings.position_embeddings",
                    offset="padding",
                    config_counts_offset=True,
                    buffers=("embeddings.position_ids",),
                ),
                causal=False,
                traits=AttentionTraits(
                    _mpnet,
                    positions=_thirty_two_buckets,
                    scheme="t5",
                    made_from="encoder.relative_attention_bias",
                    position_source="relative",
                ),
                position_source="input_ids",
            ),
        ),
    )
)
register(
    Family(
        name="roformer",
        summary="RoFormer: interleaved rotary positions inside attention, encoder (or decoder by config)",
        model_types=("roformer",),
        kept=("encoder.embed_positions",),
        stacks=(
            StackSpec(
                "",
                "encoder.layer.*.attention.self",
                traits=AttentionTraits(
                    _roformer,
                    positions=_interleaved,
                    scheme="rope",
                    made_from="encoder.embed_positions",
                    causal=_is_decoder,
                ),
                position_source="relative",
            ),
        ),
    )
)
