"""A config of a swapped model, taken apart and put together again, never makes an unswapped one without a word."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, GenerationConfig

import hf_posswap
from hf_posswap.errors import CheckpointError
from hf_posswap.patching.record.refusals import REFUSED_ATTENTION
from tests.contract.models import LENGTH
from tests.contract.pairs import Pair, words

PAIRS = (
    Pair("llama", "alibi"),
    Pair("gpt2", "rope"),
    Pair("gpt2", "fire"),
    Pair("bert", "t5"),
    Pair("bloom", "rope"),
    Pair("gptj", "alibi"),
    Pair("gpt_neo", "self_extend"),
    Pair("bart", "rope", stack="decoder"),
)
IDS = words(2, LENGTH - 4)


def updated(config: Any, values: dict[str, Any]) -> Any:
    config.update(values)
    return config


STOCK: dict[str, Callable[[Any, Any], Any]] = {
    "from_dict": lambda native, config: type(native).from_dict(config.to_dict()),
    "keywords": lambda native, config: type(native)(**config.to_dict()),
    "what differs": lambda native, config: type(native)(**config.to_diff_dict()),
    "for_model": lambda native, config: AutoConfig.for_model(**config.to_dict()),
    "update": lambda native, config: updated(copy.deepcopy(native), config.to_dict()),
    "what it holds": lambda native, config: type(native)(**vars(config)),
    "what a copy holds": lambda native, config: type(native)(**vars(copy.deepcopy(config))),
    "json of the dict": lambda native, config: type(native)(**json.loads(json.dumps(config.to_dict()))),
    "json of the config": lambda native, config: type(native)(**json.loads(config.to_json_string())),
    "again": lambda native, config: type(native)(**type(native)(**config.to_dict()).to_dict() | config.to_dict()),
}


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("road", STOCK)
@pytest.mark.filterwarnings("ignore:Missing validation function")
def test_a_stock_config_made_from_the_values_of_a_swapped_one_is_refused_by_name(pair: Pair, road: str) -> None:
    native, swapped = pair.native(), pair.swapped()
    config = STOCK[road](native.config, swapped.config)
    assert type(config) is type(native.config)
    for build in (type(native), AutoModel.from_config):
        with pytest.raises((ValueError, KeyError), match=r"pip install hf-posswap"):
            build(config)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.filterwarnings("ignore:Missing validation function")
def test_the_values_give_a_swapped_model_by_the_classes_of_swapped_ones(pair: Pair) -> None:
    model = pair.swapped()
    cls, values = type(model.config), model.config.to_dict()
    configs = [cls(**values), cls.from_dict(dict(values)), type(pair.native().config)(**values)]
    assert all(one.posswap == model.config.posswap for one in configs)
    for config in configs:
        clone = type(model)(config).eval()
        clone.load_state_dict(model.state_dict())
        assert torch.equal(pair.logits(clone, IDS), pair.logits(model, IDS))


def test_the_values_ask_for_the_attention_of_no_stock_model_and_a_config_keeps_its_own() -> None:
    model = Pair("gpt2", "rope").swapped(attn_implementation="eager")
    values = model.config.to_dict()
    assert values["attn_implementation"] == REFUSED_ATTENTION
    assert "attn_implementation" not in GenerationConfig.from_model_config(model.config).to_dict()
    model.config.update(values)
    assert model.config._attn_implementation == "eager"
    assert "attn_implementation" not in Pair("gpt2", "nope").swapped().config.to_dict()  # native: stock runs it


def test_the_values_name_their_mechanism_to_peft_and_say_the_same_of_a_copy() -> None:
    config = Pair("gpt2", "rope").swapped().config
    assert config.to_dict()["model_type"] == "gpt2"
    assert type(config)(**config.to_dict()).to_dict() == config.to_dict()


def test_a_config_written_from_the_values_by_hand_is_refused_when_its_folder_is_loaded(tmp_path: Path) -> None:
    model = Pair("gpt2", "rope").swapped()
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()), encoding="utf-8")
    with pytest.raises(ValueError, match="pip install hf-posswap"):
        Pair("gpt2", "rope").tiny.stock.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="pip install hf-posswap"):
        hf_posswap.load(tmp_path)


def test_private_values_ask_for_the_attention_of_no_stock_model_wherever_the_config_comes_from(tmp_path: Path) -> None:
    pair = Pair("gpt2", "rope")
    model = pair.swapped()
    model.save_pretrained(tmp_path)
    again = type(model)(model.config)
    configs = [
        model.config, again.config, copy.deepcopy(model.config), pickle.loads(pickle.dumps(model.config)),
        AutoConfig.from_pretrained(tmp_path), hf_posswap.load(tmp_path).config,
        type(model.config)(**vars(model.config)),
    ]  # fmt: skip
    for config in configs:
        with pytest.raises(ValueError, match="pip install hf-posswap"):
            pair.tiny.stock(type(pair.native().config)(**vars(config)))
        assert config._attn_implementation in (None, "sdpa"), "the config itself keeps its own"
    assert "attn_implementation" not in vars(hf_posswap.unpatch_model(model).config)
    assert "attn_implementation" not in vars(Pair("gpt2", "nope").swapped().config)  # native: stock runs it
