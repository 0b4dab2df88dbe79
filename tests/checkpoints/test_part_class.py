"""A part of a swapped model is of a class of its own: it is copied with the swap, and refuses what would lose it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForTextEncoding,
    BartForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5EncoderModel,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)

from hf_posswap import load, patch_model, unpatch_model
from hf_posswap.errors import AlreadyPatchedError, CheckpointError, RecordError, UnsupportedSwapError
from hf_posswap.patching.record.model_class import native_class
from hf_posswap.testing.tiny import tiny_model
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


def t5(scheme: Any, folder: Path) -> Any:
    whole = patch_model(tiny_model("T5ForConditionalGeneration", meta=False), scheme, max_length=64)
    whole.save_pretrained(folder)
    return whole


@pytest.mark.parametrize("scheme", ["kerple", {"encoder": "alibi", "decoder": "rope"}, {"encoder": "alibi"}])
def test_an_encoder_is_loaded_from_the_folder_of_the_whole_model_with_its_own_scheme(
    scheme: Any, tmp_path: Path
) -> None:
    whole = t5(scheme, tmp_path / "whole")
    expected = states(whole.get_encoder())
    for part in (
        load(tmp_path / "whole", model_class=T5EncoderModel),
        AutoModelForTextEncoding.from_pretrained(tmp_path / "whole"),
    ):
        assert native_class(type(part)) is T5EncoderModel
        assert list(part.config.posswap["stacks"]) == ["encoder"]
        assert torch.equal(states(part.eval()), expected)
    part.save_pretrained(tmp_path / "part")
    assert torch.equal(states(load(tmp_path / "part").eval()), expected)


def test_a_part_whose_stack_was_not_swapped_says_how_to_get_it(tmp_path: Path) -> None:
    t5({"decoder": "alibi"}, tmp_path)
    with pytest.raises(RecordError, match=r"only the encoder, which keeps its positions.*model\.get_encoder\(\)"):
        load(tmp_path, model_class=T5EncoderModel)


def test_a_decoder_whose_embeddings_the_folder_names_otherwise_says_how_to_get_it(tmp_path: Path) -> None:
    patch_model(bart(), {"encoder": "learned", "decoder": "alibi"}, max_length=64).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"under other names.*without model_class.*model\.get_decoder\(\)"):
        load(tmp_path, model_class=BartForCausalLM)
    weights = load_file(tmp_path / "model.safetensors")
    shared = weights["model.shared.weight"]
    named = {name: shared.clone() for name in ("model.decoder.embed_tokens.weight", "lm_head.weight")}
    save_file(weights | named, tmp_path / "model.safetensors", metadata={"format": "pt"})
    part = load(tmp_path, model_class=BartForCausalLM).eval()
    assert torch.equal(states(part.model.decoder), states(load(tmp_path).eval().get_decoder()))


def test_a_part_that_another_route_would_run_says_so(tmp_path: Path) -> None:
    patch_model(bart(), {"encoder": "alibi", "decoder": "learned"}, max_length=64).save_pretrained(tmp_path)
    with pytest.raises(RecordError, match="is a part of the model, and the rest decided the route"):
        load(tmp_path, model_class=BartForCausalLM)
