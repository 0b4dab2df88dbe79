"""A part of a living model is not swapped by itself: what is saved is the whole. A model of its own is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_posswap import patch_model, plan_swap, unpatch_model
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.tiny import tiny_model
from tests.families.vision_models import build

PARTS = [
    ("CLIPModel", "vision_model", "learned_2d"),
    ("GPT2LMHeadModel", "transformer", "rope"),
    ("BertForMaskedLM", "bert", "rope"),
    ("LlamaForCausalLM", "model", "alibi"),
    ("BartForConditionalGeneration", "model", "rope"),
]


def whole_of(name: str) -> Any:
    import transformers

    return build(name) if name == "CLIPModel" else tiny_model(getattr(transformers, name), meta=False)


@pytest.mark.parametrize(("name", "path", "scheme"), PARTS)
def test_a_part_is_refused_and_by_itself_it_is_not(name: str, path: str, scheme: str) -> None:
    whole = whole_of(name)
    part = whole.get_submodule(path)
    before = {key: tensor.clone() for key, tensor in whole.state_dict().items()}
    wanted = f"this {type(part).__name__} is '{path}' of a {name}, .* What works: the whole {name}; or"
    for ask in (plan_swap, patch_model):
        with pytest.raises(UnsupportedSwapError, match=wanted):
            ask(part, scheme)
    assert all(torch.equal(tensor, before[key]) for key, tensor in whole.state_dict().items())
    assert not hasattr(whole.config, "posswap")
    twin = copy.deepcopy(part)
    patch_model(twin, scheme)
    unpatch_model(twin)
    patch_model(whole, scheme)
    unpatch_model(whole)


@pytest.mark.parametrize(("name", "path", "scheme"), PARTS)
def test_a_part_whose_whole_is_gone_is_a_model(name: str, path: str, scheme: str) -> None:
    part = whole_of(name).get_submodule(path)  # of the whole, which goes round in circles, garbage is left
    assert patch_model(part, scheme).model == type(part).__name__


class Sentences(torch.nn.Sequential):
    """Holds a model as sentence-transformers does, and saves it by itself."""


def test_other_wrappers_hold_models_of_their_own() -> None:
    held = Sentences(torch.nn.ModuleDict({"words": whole_of("BertForMaskedLM").bert}))
    patch_model(held[0]["words"], "rope")
    inner = whole_of("GPT2LMHeadModel").transformer
    listed: dict[str, Any] = {"inner": inner}  # a dict of modules that is no module's
    assert patch_model(listed["inner"], "rope").route == "plugin"


def test_it_is_found_through_modules_that_are_no_models() -> None:
    class Tower(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

    whole = tiny_model("llama", meta=False)
    whole.extra = Tower(tiny_model("bert", meta=False).bert)
    with pytest.raises(UnsupportedSwapError, match=r"this BertModel is 'extra.model' of a LlamaForCausalLM"):
        patch_model(whole.extra.model, "rope")
