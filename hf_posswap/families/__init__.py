"""Model families: where positions are in a model; importing this package registers them all.

To write a family you need: `Family` (for most models a `TableSpec` and the paths of their attention suffice);
`StackSpec` for encoder-decoders, `ImageSpec` for vision models, `AttentionTraits` for positions inside attention;
`register`, which adds it to `FAMILIES`; `family_of` and `locate`, which show its result for a model. A family is
data: paths, counts, names.

Example:
    >>> from transformers import BertConfig, BertModel
    >>> from hf_posswap.families import FAMILIES, Family, TableSpec, family_of, locate, register
    >>> class CottageConfig(BertConfig):
    ...     model_type = "cottage"
    >>> class CottageModel(BertModel):
    ...     config_class = CottageConfig
    >>> cottage = register(
    ...     Family(
    ...         name="cottage",
    ...         summary="the cottage's encoder: learned table",
    ...         model_types=("cottage",),
    ...         table=TableSpec("embeddings.position_embeddings", buffers=("embeddings.position_ids",)),
    ...         attention="encoder.layer.*.attention.self",
    ...     )
    ... )
    >>> config = CottageConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8)
    >>> family_of(config).name
    'cottage'
    >>> model = CottageModel(config)
    >>> locate(model).attention
    ('encoder.layer.0.attention.self', 'encoder.layer.1.attention.self')
    >>> from hf_posswap import patch_model, swap_plan
    >>> swap_plan(patch_model(model, "rope")).route
    'plugin'
    >>> FAMILIES.remove("cottage")  # an example leaves no trace
"""

from hf_posswap.families import decoders, encoder_decoders, encoders, rotary, vision  # noqa: F401  # each registers some
from hf_posswap.families.base import (
    FAMILIES,
    AttentionTraits,
    Family,
    ImageSpec,
    NativeScheme,
    StackSpec,
    TableSpec,
    register,
)
from hf_posswap.families.locating import family_of, locate
from hf_posswap.families.sites import Sites, Stack

__all__ = [
    "FAMILIES",
    "AttentionTraits",
    "Family",
    "ImageSpec",
    "NativeScheme",
    "Sites",
    "Stack",
    "StackSpec",
    "TableSpec",
    "family_of",
    "locate",
    "register",
]
