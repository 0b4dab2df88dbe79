"""Encoders with a learned table and BERT's attention in another class, without the interface."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_posswap.compat.transformers_models import masks_the_future
from hf_posswap.families.attention_traits import AttentionTraits
from hf_posswap.families.base import Family, StackSpec, TableSpec, register
from hf_posswap.families.modules import modeling_module

_TABLE = TableSpec("embeddings.position_embeddings", buffers=("embeddings.position_ids", "embeddings.token_type_ids"))


def is_decoder(config: Any) -> bool:
    """Return whether `config` makes the encoder a decoder."""
    return bool(getattr(config, "is_decoder", False))


def _bert_like(module: nn.Module) -> type | str:
    from hf_posswap.families.interfaces import bert_like
    from hf_posswap.families.interfaces.fitting import fitting

    if module.is_decoder and not masks_the_future(modeling_module(module)):
        return "this release of transformers lets such decoders see future tokens: nothing can be put inside."
    classes = bert_like.BigBirdInterface, bert_like.MegatronBertInterface, bert_like.RemBertInterface
    return fitting(module, *classes)


def _squeezebert(module: nn.Module) -> type | str:
    from hf_posswap.families.interfaces.fitting import fitting
    from hf_posswap.families.interfaces.squeezebert import SqueezeBertInterface

    return fitting(module, SqueezeBertInterface)


def _convbert(module: nn.Module) -> type | str:
    from hf_posswap.families.interfaces.convbert import ConvBertInterface
    from hf_posswap.families.interfaces.fitting import fitting

    return fitting(module, ConvBertInterface)


def _attending_heads(config: Any) -> tuple[int, int]:
    """Return how many heads of ConvBERT attend, and their width; the others convolve."""
    heads = max(1, config.num_attention_heads // config.head_ratio)
    return heads, config.hidden_size // heads // 2


def sees_blocks(config: Any) -> str | None:
    """Return why no scheme fits inside block-sparse attention, if the config selects it."""
    if config.attention_type == "original_full":
        return None
    return (
        f"its config says attention_type={config.attention_type!r}: its code chooses blocks of keys. "
        "What works: the same model loaded with attention_type='original_full'"
    )


register(
    Family(
        name="megatron-bert",
        summary="Megatron-BERT, RemBERT: learned table, encoder (or decoder by config)",
        model_types=("megatron-bert", "rembert"),
        stacks=(
            StackSpec(
                "",
                "encoder.layer.*.attention.self",
                table=_TABLE,
                traits=AttentionTraits(_bert_like, causal=is_decoder),
            ),
        ),
    )
)
register(
    Family(
        name="convbert",
        summary="ConvBERT: learned table, encoder, half of whose heads convolve",
        model_types=("convbert",),
        stacks=(
            StackSpec(
                "",
                "encoder.layer.*.attention.self",
                table=_TABLE,
                traits=AttentionTraits(_convbert, causal=is_decoder, heads=_attending_heads),
            ),
        ),
    )
)
register(
    Family(
        name="big_bird",
        summary="BigBird: learned table, encoder that attends to blocks, or to all (or decoder by config)",
        model_types=("big_bird",),
        stacks=(
            StackSpec(
                "",
                "encoder.layer.*.attention.self",
                table=_TABLE,
                traits=AttentionTraits(_bert_like, causal=is_decoder, closed=sees_blocks),
            ),
        ),
    )
)
register(
    Family(
        name="squeezebert",
        summary="SqueezeBERT: learned table, encoder",
        model_types=("squeezebert",),
        stacks=(
            StackSpec(
                "", "encoder.layers.*.attention", table=_TABLE, traits=AttentionTraits(_squeezebert, causal=is_decoder)
            ),
        ),
    )
)
