"""T5-like encoder-decoders: a learned bias on the scores, by buckets of distances, and no other positions."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_posswap.compat.transformers_attention import attends_by_interface
from hf_posswap.families.attention_traits import AttentionTraits, NativeScheme
from hf_posswap.families.base import Family, StackSpec, register


def _buckets(config: Any) -> NativeScheme:
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
    from hf_posswap.families.interfaces import t5
    from hf_posswap.families.interfaces.fitting import fitting

    return fitting(module, t5.T5Interface, t5.MT5Interface, t5.UMT5Interface, t5.LongT5Interface)


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
