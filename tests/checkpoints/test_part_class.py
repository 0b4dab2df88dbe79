"""A part of a swapped model is of a class of its own: it is copied with the swap, and refuses what would lose it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)

from hf_posswap import patch_model, unpatch_model
from hf_posswap.errors import AlreadyPatchedError, CheckpointError, RecordError, UnsupportedSwapError
from hf_posswap.patching.record.model_class import native_class
from tests.contract.pairs import Pair
from tests.families import vision_models

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEEN: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 32,
    "patch_size": 8,
}
IDS = torch.arange(4, 20)[None]


def llava() -> Any:
    config = LlavaConfig(text_config=LlamaConfig(**TEXT), vision_config=CLIPVisionConfig(**SEEN), image_token_index=3)
    return LlavaForConditionalGeneration(config).eval()


def t5gemma() -> Any:
    return T5GemmaForConditionalGeneration(T5GemmaConfig(encoder=dict(TEXT), decoder=dict(TEXT), vocab_size=97)).eval()


def bart() -> Any:
    return Pair("bart", "alibi").native()


def clip() -> Any:
    return vision_models.build("CLIPModel")


PARTS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "llava": (llava, "alibi", "model.language_model"),
    "t5gemma encoder": (t5gemma, "alibi", "model.encoder"),
    "t5gemma decoder": (t5gemma, "kerple", "model.decoder"),
    "bart encoder": (bart, "alibi", "model.encoder"),
    "bart decoder": (bart, "rope", "model.decoder"),
    "clip": (clip, "rope_2d", "vision_model"),
}


def states(part: Any) -> torch.Tensor:
    sees = "Vision" in type(part).__name__
    given = {"pixel_values": vision_models.images()} if sees else {"input_ids": IDS}
    if "Decoder" in type(part).__name__:
        width = part.get_input_embeddings().embedding_dim
        given["encoder_hidden_states"] = torch.linspace(-1, 1, 5 * width).view(1, 5, width)
    with torch.no_grad():
        return part(**given).last_hidden_state


def whole_and_part(name: str) -> tuple[Any, Any, Any]:
    """Return a swapped whole, a part of it, and the same part of a stock whole."""
    build, scheme, path = PARTS[name]
    whole, stock = build(), build()
    patch_model(whole, scheme)
    return whole, whole.get_submodule(path), stock.get_submodule(path)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_of_a_subclass_and_unpatching_gives_its_own_class_back(name: str) -> None:
    whole, part, stock = whole_and_part(name)
    assert type(part) is not type(stock)
    assert isinstance(part, type(stock))
    assert native_class(type(part)) is type(stock)
    assert (type(part).__name__, type(part).__module__) == (type(stock).__name__, type(stock).__module__)
    unpatch_model(whole)
    assert type(part) is type(stock)


def test_parts_that_keep_their_positions_stay_stock() -> None:
    whole, _, stock = whole_and_part("llava")
    assert type(whole.model.vision_tower) is native_class(type(whole.model.vision_tower))
    stock.load_state_dict(stock.state_dict())
    both, one = bart(), bart()
    patch_model(one, {"decoder": "alibi"})
    assert type(one.model.encoder) is type(both.model.encoder)
    assert type(one.model.decoder) is not type(both.model.decoder)


@pytest.mark.parametrize("name", PARTS)
def test_copies_and_pickles_of_a_part_and_weights_of_its_like_are_swapped(name: str) -> None:
    whole, part, _ = whole_and_part(name)
    expected = states(part)
    for again in (copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
        assert type(again) is type(part)
        assert torch.equal(states(again), expected)
    clone = type(whole)(whole.config).eval()
    like = clone.get_submodule(PARTS[name][2])
    like.load_state_dict(part.state_dict())
    assert torch.equal(states(like), expected)
    clone.load_state_dict(whole.state_dict())


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_not_built_from_its_config(name: str) -> None:
    _, part, _ = whole_and_part(name)
    for config in (part.config, copy.deepcopy(part.config), type(part.config)(**part.config.to_dict())):
        with pytest.raises(RecordError, match=r"inside a swapped model, .*Use copy\.deepcopy\(part\)"):
            type(part)(config)


@pytest.mark.parametrize("name", PARTS)
def test_a_stock_part_takes_no_weights_of_a_swapped_one(name: str, tmp_path: Path) -> None:
    _, part, stock = whole_and_part(name)
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"that hf_posswap swapped.*as dict\(state_dict\)"):
            stock.load_state_dict(part.state_dict(), strict=strict)
    with pytest.raises(UnsupportedSwapError, match="is a part of a swapped model.*Save the whole model"):
        part.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_not_swapped_again(name: str) -> None:
    _, part, _ = whole_and_part(name)
    with pytest.raises(
        AlreadyPatchedError, match="is a part of a model that carries a swap.*unpatch_model on the whole"
    ):
        patch_model(part, "rope_2d" if name == "clip" else "alibi")


@pytest.mark.filterwarnings("ignore:Missing validation function")
def test_the_config_of_a_part_alone_is_refused_or_makes_a_stock_part_that_takes_no_swapped_weights() -> None:
    """The limit: a tower's config says nothing of positions. What the tower could learn from is refused."""
    _, part, _ = whole_and_part("llava")
    for road in (part.config, part.config.get_text_config(), LlamaConfig(**part.config.to_dict())):
        with pytest.raises(KeyError, match="pip install hf-posswap"):
            AutoModel.from_config(road)
    _, tower, _ = whole_and_part("clip")
    with pytest.raises(CheckpointError, match="that hf_posswap swapped"):
        AutoModel.from_config(tower.config).load_state_dict(tower.state_dict())
