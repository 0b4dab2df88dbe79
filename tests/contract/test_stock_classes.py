"""A stock class given a swapped model's config in memory: it refuses, where it would build the model unswapped."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

from hf_posswap import patch_model, verify_swap
from hf_posswap.errors import RecordError
from hf_posswap.patching.record.model_class import native_class
from hf_posswap.patching.record.record import native_config
from tests.contract.models import LENGTH
from tests.contract.others import ALL
from tests.contract.pairs import Pair, daily_schemes, refusal, words
from tests.families import vision_models
from tests.families.vision_models import DINO, TOLD
from tests.toys.registration import registered

REFUSED = r"builds a model without the swap that this config records.*type\(model\)\(config\)"
NATIVE_ALONE = {"xlm", "longformer", "tapas", "hrm_text", "led", "t5gemma2"}
"""Models of which every swap that is tried is one that stock transformers runs."""


def plugin_pair(name: str) -> Pair | None:
    """Return a pair of the model called `name` that only hf_posswap runs; None: there is none."""
    pairs = (Pair(name, scheme) for scheme in daily_schemes(name))
    return next((pair for pair in pairs if refusal(pair) is None and pair.plan.route == "plugin"), None)


def copies(config: Any) -> Iterator[Any]:
    yield config
    yield copy.copy(config)
    yield copy.deepcopy(config)
    yield pickle.loads(pickle.dumps(config))
    if reads_back(native_config(config)):
        yield type(config).from_dict(config.to_dict())


def reads_back(config: Any) -> bool:
    """Return whether the config's own class takes what it writes: DBRX's does not in transformers 5.14."""
    try:
        type(config).from_dict(config.to_dict())
    except ValueError:
        return False
    return True


def assert_stock_classes_refuse(model: Any) -> None:
    class Own(native_class(type(model))):  # type: ignore[misc]
        """A class of the user's own."""

    classes = {native_class(type(model)), native_class(type(model.base_model)), Own}
    for config in copies(model.config):
        for stock in classes:
            with pytest.raises(RecordError, match=REFUSED):
                stock(config)


@pytest.mark.parametrize("name", ALL)
def test_the_stock_class_refuses_the_config_and_its_own_class_takes_it(name: str) -> None:
    with registered():
        pair = plugin_pair(name)
        assert (pair is None) == (name in NATIVE_ALONE)
        if pair is None:
            return
        model = pair.swapped()
        assert_stock_classes_refuse(model)
        ids = words(2, LENGTH - 4)
        for config in copies(model.config):
            clone = type(model)(config).eval()
            clone.load_state_dict(model.state_dict())
            given = {"input_ids": ids} | ({"decoder_input_ids": ids} if pair.tiny.paired else {})
            if not pair.tiny.hears:
                with torch.no_grad():
                    assert torch.equal(clone(**given).logits, model(**given).logits)


@pytest.mark.parametrize("name", [name for name in vision_models.OF_EACH_FAMILY if TOLD or name not in DINO])
def test_a_stock_class_that_sees_images_refuses_the_config(name: str) -> None:
    model = vision_models.build(name)
    patch_model(model, "rope_2d")
    assert_stock_classes_refuse(model)
    assert type(type(model)(model.config)) is type(model)


def gpt2() -> Any:
    return Pair("gpt2", "rope").swapped()


def test_every_head_refuses_by_its_name_and_is_swapped_by_its_auto_class() -> None:
    config = gpt2().config
    with pytest.raises(RecordError, match=r"GPT2ForSequenceClassification\(config\) builds a model without the swap"):
        GPT2ForSequenceClassification(config)
    verify_swap(AutoModelForSequenceClassification.from_config(config))
    with torch.device("meta"), pytest.raises(RecordError, match=REFUSED):
        GPT2Model(config)


def test_a_native_swap_builds_by_its_stock_class() -> None:
    for pair in (Pair("gpt2", "nope"), Pair("llama", "yarn"), Pair("bert", "sinusoidal")):
        model = pair.swapped()
        clone = native_class(type(model))(model.config).eval()
        clone.load_state_dict(model.state_dict())
        ids = words(2, LENGTH - 4)
        assert torch.equal(pair.logits(clone, ids), pair.logits(model, ids))


def test_a_refusal_leaves_config_and_model_as_they_were() -> None:
    model = gpt2()
    before = model.config.to_dict(), model.config._attn_implementation
    with pytest.raises(RecordError, match=REFUSED):
        GPT2LMHeadModel(model.config)
    assert (model.config.to_dict(), model.config._attn_implementation) == before


def test_the_implementations_of_a_swapped_model_and_of_its_config_are_set_as_ever() -> None:
    model = gpt2()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    assert model.config._attn_implementation == "eager"
    model.config._attn_implementation = "sdpa"
    model.config._experts_implementation = None
    assert model.config._attn_implementation == "sdpa"
    clone = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), attn_implementation="eager")
    assert (type(clone), clone.config._attn_implementation) == (type(model), "eager")


class Scoring(PreTrainedModel):
    """A model of the user's own around any model, with that model's config."""

    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.inner = AutoModelForCausalLM.from_config(config)
        self.post_init()


class Building(Scoring):
    def __init__(self, config: Any) -> None:
        PreTrainedModel.__init__(self, config)
        self.inner = GPT2LMHeadModel(config)


def test_a_model_around_any_model_is_built_and_what_it_holds_is_swapped_or_refuses() -> None:
    config = gpt2().config
    verify_swap(Scoring(config).inner)
    with pytest.raises(RecordError, match=r"GPT2LMHeadModel\(config\)"):
        Building(config)


def test_a_config_around_a_swapped_one_builds_a_swapped_part() -> None:
    inner = Pair("llama", "alibi").swapped().config
    seen = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    whole = LlavaForConditionalGeneration(
        LlavaConfig(text_config=inner, vision_config={"model_type": "clip_vision_model", **seen, "image_size": 30})
    )
    assert whole.model.language_model.config.posswap == inner.posswap
    verify_swap(whole.model.language_model)


def test_a_config_without_its_record_is_that_of_a_stock_model() -> None:
    config = gpt2().config
    del config.posswap
    assert type(GPT2LMHeadModel(config)) is GPT2LMHeadModel
    assert type(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2))) is GPT2LMHeadModel
