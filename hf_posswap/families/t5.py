"""The T5 kind: encoder-decoders with a learned bias on the scores, by buckets of distances, and no other positions."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_posswap.families.base import Family, StackSpec, register
from hf_posswap.families.modules import modeling_module
from hf_posswap.families.own import NativeScheme, OwnAttention


def _buckets(config: Any) -> NativeScheme:
    return {
        "name": "t5",
        "num_buckets": config.relative_attention_num_buckets,
        "max_distance": config.relative_attention_max_distance,
    }


def _t5(module: nn.Module) -> type | str:
    """Return the class of `module`, or where transformers has none with the interface yet, the one that equals it."""
    if hasattr(modeling_module(module), "ALL_ATTENTION_FUNCTIONS"):
        return type(module)
    from hf_posswap.families.interfaces.fitting import fitting
    from hf_posswap.families.interfaces.t5 import MT5Interface, T5Interface, UMT5Interface

    known = {cls.__bases__[-1].__name__: cls for cls in (T5Interface, MT5Interface, UMT5Interface)}
    return fitting(module, known.get(type(module).__name__, T5Interface))


def _stack(name: str) -> StackSpec:
    attention = f"{name}.block.*.layer.0.SelfAttention"
    own = OwnAttention(
        _t5, positions=_buckets, made_from=f"{attention}.relative_attention_bias", length_name=None, length=512
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
