"""Models that see images, with a learned table of one row a patch, and no other position mechanism.

In a model with two towers (CLIP, SigLIP) only the vision tower is swapped; the text tower keeps its positions.
"""

from __future__ import annotations

from hf_posswap.families.base import AttentionTraits, Family, ImageSpec, StackSpec, register
from hf_posswap.families.interfaces.base import ChosenInterface

_TABLE, _PATCHES = "position_embeddings", "patch_embeddings.projection"


register(
    Family(
        name="vit",
        summary="ViT: learned table of patches after a class token, sees images",
        model_types=("vit",),
        stacks=(
            StackSpec(
                "",
                "layers.*.attention",
                image=ImageSpec(_TABLE, _PATCHES, prefix=1, square_heads=frozenset({"ViTForMaskedImageModeling"})),
            ),
        ),
    )
)
register(
    Family(
        name="deit",
        summary="DeiT: learned table of patches after a class and a distillation token, sees images",
        model_types=("deit",),
        stacks=(
            StackSpec(
                "",
                "layers.*.attention",
                image=ImageSpec(_TABLE, _PATCHES, prefix=2, square_heads=frozenset({"DeiTForMaskedImageModeling"})),
            ),
        ),
    )
)
register(
    Family(
        name="dinov2",
        summary="DINOv2: learned table of patches after a class token, interpolated by itself, sees images",
        model_types=("dinov2",),
        stacks=(
            StackSpec(
                "",
                "encoder.layer.*.attention",
                causal=False,
                image=ImageSpec(_TABLE, _PATCHES, prefix=1, square_config=True),
            ),
        ),
    )
)
register(
    Family(
        name="clip",
        summary="CLIP, by itself or in the whole model: learned table of patches after a class token, sees images",
        model_types=("clip", "clip_vision_model"),
        towers=("vision_model", ""),
        kept=("text_model",),
        stacks=(
            StackSpec(
                "",
                "encoder.layers.*.self_attn",
                image=ImageSpec(
                    "position_embedding.weight", "patch_embedding", prefix=1, ids="position_ids", square_config=True
                ),
            ),
        ),
    )
)
register(
    Family(
        name="siglip",
        summary="SigLIP, by itself or in the whole model: learned table of patches alone, sees images",
        model_types=("siglip", "siglip_vision_model"),
        towers=("vision_model", ""),
        kept=("text_model",),
        stacks=(
            StackSpec(
                "",
                "encoder.layers.*.self_attn",
                image=ImageSpec(
                    "position_embedding.weight", "patch_embedding", prefix=0, ids="position_ids", square_config=True
                ),
                traits=AttentionTraits(ChosenInterface("siglip", ("SiglipInterface",))),
            ),
        ),
    )
)
