"""A swap leaves as it is what the user has set on a model: dropouts, epsilons, scalings, whatever follows no length."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers import PreTrainedModel

from hf_posswap import patch_model, unpatch_model
from hf_posswap.testing.tiny import tiny_model

SWAPS: list[tuple[str, str, dict[str, Any]]] = [
    ("GPT2LMHeadModel", "alibi", {"max_length": 256}),
    ("GPT2LMHeadModel", "rope", {"max_length": 256}),
    ("GPTJForCausalLM", "alibi", {"max_length": 256}),
    ("GPTJForCausalLM", "self_extend", {"group": 4}),
    ("CodeGenForCausalLM", "alibi", {"max_length": 256}),
    ("CodeGenForCausalLM", "self_extend", {"group": 4}),
    ("GPTNeoForCausalLM", "alibi", {"max_length": 256}),
    ("FalconForCausalLM", "yarn", {"max_length": 256}),
    ("OPTForCausalLM", "rope", {"max_length": 256}),
    ("BertForMaskedLM", "rope", {"max_length": 256}),
    ("BartForConditionalGeneration", "sinusoidal", {"max_length": 256}),
    ("LlamaForCausalLM", "yarn", {"max_length": 256}),
    ("LlamaForCausalLM", "linear", {"factor": 4.0}),
    ("Qwen2ForCausalLM", "nope", {"max_length": 256}),
    ("GPTNeoXForCausalLM", "yarn", {"max_length": 256}),
    ("DeepseekV3ForCausalLM", "yarn", {"max_length": 256}),
    ("ViTForImageClassification", "rope_2d", {}),
]


def numbers(model: nn.Module) -> dict[tuple[str, str], float]:
    """Return every floating attribute of every module."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and not name.startswith("_")
    }


def changed_by_user(model: PreTrainedModel) -> dict[tuple[str, str], float]:
    """Set every floating attribute otherwise, as TRL's `disable_dropout` sets some, and return all of them."""
    for path, name in numbers(model):
        module = model.get_submodule(path)
        setattr(module, name, 0.0 if isinstance(module, nn.Dropout) else getattr(module, name) * 2 + 0.125)
    return numbers(model)


@pytest.mark.parametrize(("kind", "scheme", "options"), SWAPS)
def test_a_swap_keeps_what_the_user_has_set(kind: str, scheme: str, options: dict[str, Any]) -> None:
    model = tiny_model(kind, meta=False)
    wanted = changed_by_user(model)
    assert wanted
    patch_model(model, scheme, **options)
    kept = {where: value for where, value in numbers(model).items() if where in wanted}
    kept = {where: value for where, value in kept.items() if "rotary" not in where[0]}  # those modules are new
    assert kept == {where: wanted[where] for where in kept}
    assert len(kept) >= len([name for path, name in wanted if path and "rotary" not in path]) - 2  # but for the tables'
    unpatch_model(model)
    assert numbers(model) == wanted
