"""A module with a second name in its model is swapped under both: kvpress leaves the rotary module in each attention.

A second name may come first in the order of modules; the model calls its module by the other one.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from hf_posswap import patch_model, plan_swap, unpatch_model
from tests.contract.models import build
from tests.contract.pairs import CHANGE, gap, logits, words

IDS = words(2, 20)
SWAPS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "nope", {}),
    ("llama", "linear", {"factor": 4.0}),
    ("llama", "yarn", {"factor": 4.0}),
    ("llama", "alibi", {}),
    ("llama", "self_extend", {"max_length": 64}),
    ("llama", "xpos", {}),
    ("gpt2", "rope", {}),
    ("gpt2", "sinusoidal", {"max_length": 64}),
    ("gpt2", "learned", {"max_length": 64}),
]


def layers_of(model: Any) -> Any:
    return model.model.layers if hasattr(model, "model") else model.transformer.h


def in_each_attention(model: Any) -> Any:
    """Give the module of positions a name in each attention module, as kvpress does."""
    for layer in layers_of(model):
        if hasattr(layer, "self_attn"):
            layer.self_attn.rotary_emb = model.model.rotary_emb
        else:
            layer.attn.wpe = model.transformer.wpe
    return model


def beside_the_layers(model: Any) -> Any:
    """Give layers a shorter name, and the module of positions one in the whole model."""
    model.first_layer, model.base_model.last_layer = layers_of(model)[0], layers_of(model)[-1]
    model.positions = model.model.rotary_emb if hasattr(model, "model") else model.transformer.wpe
    return model


@pytest.mark.parametrize("name_again", [in_each_attention, beside_the_layers])
@pytest.mark.parametrize(("kind", "scheme", "options"), SWAPS)
def test_a_module_with_two_names_is_swapped_under_both(
    kind: str, scheme: str, options: dict[str, Any], name_again: Any
) -> None:
    stock = build(kind)
    before, expected = logits(stock, IDS), logits(patch_model(copy.deepcopy(stock), scheme, **options), IDS)
    model = name_again(copy.deepcopy(stock))
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    plan, other = plan_swap(stock, scheme, **options), plan_swap(model, scheme, **options)
    assert [edit.path for edit in other.edits] == [edit.path for edit in plan.edits]
    patch_model(model, scheme, **options)
    assert gap(logits(model, IDS), expected) == 0
    assert gap(logits(copy.deepcopy(model), IDS), expected) == 0
    unpatch_model(model)
    assert gap(logits(model, IDS), before) == 0
    assert [name for name, _ in model.named_modules(remove_duplicate=False)] == names


@pytest.mark.parametrize("scheme", ["alibi", "nope", "yarn:factor=4"])
def test_a_name_given_while_a_model_is_swapped_does_not_keep_the_swap(scheme: str) -> None:
    model = build("llama")
    before = logits(model, IDS)
    in_each_attention(patch_model(model, scheme))
    assert gap(logits(model, IDS), before) > CHANGE
    unpatch_model(model)
    assert gap(logits(model, IDS), before) == 0
    assert model.model.layers[0].self_attn.rotary_emb is model.model.rotary_emb
    expected = logits(patch_model(build("llama"), "linear", factor=4.0), IDS)
    assert gap(logits(patch_model(model, "linear", factor=4.0), IDS), expected) == 0
