"""Tiny models that see images, of every class of every family, with weights large enough for positions to show."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.stock import RELEASE

SIZE, PATCH = 32, 8
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "image_size": SIZE,
    "patch_size": PATCH,
}
_TEXT: dict[str, Any] = {
    **{name: value for name, value in _SIZES.items() if "size" not in name or name in ("hidden_size",)},
    "intermediate_size": 48,
    "vocab_size": 99,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CLASSES = {
    "ViTModel": "ViTConfig",
    "ViTForImageClassification": "ViTConfig",
    "ViTForMaskedImageModeling": "ViTConfig",
    "DeiTModel": "DeiTConfig",
    "DeiTForImageClassification": "DeiTConfig",
    "DeiTForImageClassificationWithTeacher": "DeiTConfig",
    "DeiTForMaskedImageModeling": "DeiTConfig",
    "CLIPVisionModel": "CLIPVisionConfig",
    "CLIPVisionModelWithProjection": "CLIPVisionConfig",
    "CLIPForImageClassification": "CLIPConfig",
    "CLIPModel": "CLIPConfig",
    "SiglipVisionModel": "SiglipVisionConfig",
    "SiglipForImageClassification": "SiglipConfig",
    "SiglipModel": "SiglipConfig",
}
DINO = {"Dinov2Model": "Dinov2Config", "Dinov2ForImageClassification": "Dinov2Config"}
TOLD = RELEASE >= (5, 18)
"""Whether this transformers hands on to the attention of DINOv2 what its model is called with."""
if TOLD:
    CLASSES |= DINO
OF_EACH_FAMILY = (
    "ViTForImageClassification",
    "DeiTForImageClassification",
    "CLIPVisionModel",
    "SiglipVisionModel",
    "Dinov2ForImageClassification",
)
FIRST = tuple(name for name in OF_EACH_FAMILY if name in CLASSES)
"""One class of each family that takes every scheme."""
WHOLE = ("CLIPModel", "SiglipModel")
SQUARE = ("ViTForMaskedImageModeling", "DeiTForMaskedImageModeling")
PREFIX = {"ViT": 1, "DeiT": 2, "CLIP": 1, "Siglip": 0, "Dinov2": 1}


def config_of(name: str, **changes: Any) -> Any:
    """Return the config of the class called `name`; `changes` are of what sees images."""
    config_class = (CLASSES | DINO)[name]
    cls = getattr(transformers, config_class)
    values = _SIZES | changes
    if config_class in ("CLIPConfig", "SiglipConfig"):
        return cls(vision_config=values, text_config=_TEXT)
    if name in DINO:
        values = {key: value for key, value in values.items() if key != "intermediate_size"} | {"mlp_ratio": 2}
    return cls(**values | ({"encoder_stride": PATCH} if name in SQUARE else {}))


def build(name: str, **changes: Any) -> Any:
    """Return a tiny model of the class called `name`, in eval mode, the same one for the same arguments."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = getattr(transformers, name)(config_of(name, **changes))
        with torch.no_grad():
            for parameter in model.parameters():
                nn.init.normal_(parameter, std=0.2) if parameter.ndim > 1 else parameter.add_(0.1)
    return model.eval()


def prefix_of(name: str) -> int:
    """Return how many tokens without a place the class called `name` has."""
    return next(count for start, count in PREFIX.items() if name.startswith(start))


def tower_of(model: Any) -> Any:
    """Return what sees images in `model`."""
    return getattr(model, "vision_model", None) or getattr(model, model.base_model_prefix, model)


def images(height: int = SIZE, width: int = SIZE, batch: int = 2, seed: int = 0) -> Tensor:
    """Return noise [B, 3, height, width]."""
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(seed))


def states(model: Any, pixels: Tensor, **kwargs: Any) -> Tensor:
    """Return the last hidden states [B, N, E] of what sees images, without gradients."""
    with torch.no_grad():
        return tower_of(model)(pixel_values=pixels, **kwargs).last_hidden_state
