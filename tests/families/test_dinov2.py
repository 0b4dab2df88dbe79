"""DINOv2, whose embeddings interpolate their table by themselves, and its kin that are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BeitConfig, Dinov2Backbone, Dinov2Config, Dinov2WithRegistersConfig

from hf_posswap import patch_model, plan_swap, supports, swap_plan, unpatch_model
from hf_posswap.errors import UnsupportedModelError, UnsupportedSwapError
from hf_posswap.families.locating import family_of
from tests.families.vision_models import PATCH, SIZE, TOLD, build, images, states

OTHER = (24, 40)
NAME = "Dinov2ForImageClassification"


def table_by_hand(model: Any, high: int, wide: int) -> torch.Tensor:
    """Return what stock transformers adds to `high` x `wide` patches after the class token, [1, N, E]."""
    embeddings = model.dinov2.embeddings
    tokens = torch.zeros(1, 1 + high * wide, 32)
    with torch.no_grad():
        return embeddings.interpolate_pos_encoding(tokens, high * PATCH, wide * PATCH)


def test_its_own_table_at_any_image_size_is_what_stock_adds() -> None:
    model, native = build(NAME), build(NAME)
    assert swap_plan(patch_model(model, "learned_2d")).route == "native"
    for size in ((SIZE, SIZE), OTHER, (48, 48)):
        assert torch.equal(states(model, images(*size)), states(native, images(*size)))
    assert torch.equal(table_by_hand(model, 3, 5), table_by_hand(native, 3, 5))


def test_a_larger_table_is_what_stock_interpolates() -> None:
    model, native = build(NAME), build(NAME)
    patch_model(model, "learned_2d", image_size=48)
    held = model.dinov2.embeddings.position_embeddings
    torch.testing.assert_close(held.detach(), table_by_hand(native, 6, 6), atol=1e-6, rtol=0)


def test_no_positions_is_a_stock_model_with_zero_rows() -> None:
    model, native = build(NAME), build(NAME)
    patch_model(model, "nope")
    with torch.no_grad():
        native.dinov2.embeddings.position_embeddings[:, 1:] = 0
    torch.testing.assert_close(states(model, images(*OTHER)), states(native, images(*OTHER)), atol=1e-5, rtol=0)


def test_its_config_says_square_images_alone() -> None:
    with pytest.raises(UnsupportedSwapError, match="24 x 40 cannot be expressed in the config of Dinov2ForImageClass"):
        plan_swap(build(NAME), "learned_2d", image_size=OTHER)


def test_a_backbone_takes_its_own_table_and_gives_it_back() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 2}
    model = Dinov2Backbone(Dinov2Config(**sizes, image_size=SIZE, patch_size=PATCH)).eval()
    nn.init.normal_(model.embeddings.position_embeddings)
    with torch.no_grad():
        before = model(images()).feature_maps[-1]
        patch_model(model, "nope")
        assert not torch.equal(model(images()).feature_maps[-1], before)
        unpatch_model(model)
        assert torch.equal(model(images()).feature_maps[-1], before)


def test_where_attention_is_told_of_nothing_the_table_alone_is_swapped() -> None:
    model = build(NAME)
    assert [supports(model, scheme) for scheme in ("sinusoidal_2d", "rope_2d", "alibi_2d")] == [True, TOLD, TOLD]
    if not TOLD:
        with pytest.raises(UnsupportedSwapError, match=r"What works: sinusoidal_2d, learned_2d, nope\."):
            patch_model(model, "rope_2d")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (BeitConfig, "its custom attention code adds a learned bias for each pair of patches"),
        (Dinov2WithRegistersConfig, "its register tokens"),
    ],
)
def test_its_kin_are_refused_by_name(config: Any, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"model type '{config.model_type}' is not supported: {why}"):
        family_of(config())
