"""Encoders whose attention lacks the interface and has positions of its own inside: MPNet, RoFormer."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_posswap.families.base import Family, StackSpec, TableSpec, register
from hf_posswap.families.modules import modeling_module
from hf_posswap.families.own import NativeScheme, OwnAttention


def _mpnet(module: nn.Module) -> type | str:
    from hf_posswap.families.interfaces.fitting import fitting
    from hf_posswap.families.interfaces.mpnet import MPNetInterface

    return fitting(module, MPNetInterface)


def _roformer(module: nn.Module) -> type | str:
    from hf_posswap.families.interfaces.fitting import fitting
    from hf_posswap.families.interfaces.roformer import RoFormerInterface

    if module.is_decoder and not hasattr(modeling_module(module), "create_causal_mask"):
        return "this release of transformers lets decoders of its kind see their future"
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
                own=OwnAttention(_mpnet, positions=_thirty_two_buckets, made_from="encoder.relative_attention_bias"),
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
                own=OwnAttention(
                    _roformer,
                    positions=_interleaved,
                    made_from="encoder.embed_positions",
                    causal=_is_decoder,
                ),
            ),
        ),
    )
)
