"""The T5 kind: encoder-decoders with a learned bias on the scores, by buckets of distances, and no other positions."""

from __future__ import annotations

from typing import Any

from hf_posswap.families.base import Family, StackSpec, register
from hf_posswap.families.own import NativeScheme, OwnAttention


def _buckets(config: Any) -> NativeScheme:
    return {
        "name": "t5",
        "num_buckets": config.relative_attention_num_buckets,
        "max_distance": config.relative_attention_max_distance,
    }


def _stack(name: str) -> StackSpec:
    attention = f"{name}.block.*.layer.0.SelfAttention"
    own = OwnAttention(
        positions=_buckets, made_from=f"{attention}.relative_attention_bias", length_name=None, length=512
    )
    return StackSpec(name, attention, entry=name, causal=name == "decoder", own=own)


register(
    Family(
        name="t5",
        summary="T5, mT5, UMT5: a learned bias for each bucket of distances, in encoder and decoder",
        model_types=("t5", "mt5", "umt5"),
        stacks=(_stack("encoder"), _stack("decoder")),
    )
)
