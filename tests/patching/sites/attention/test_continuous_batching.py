"""Continuous batching of swapped models: true answers, or a refusal at the call and not in a worker thread."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_posswap import patch_model, unpatch_model
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.locating import locate
from hf_posswap.patching.inspect.describe import stand_ins
from hf_posswap.schemes import SCHEMES
from tests.contract.models import build
from tests.contract.pairs import words

SETTINGS = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=1)
PROMPTS = [words(1, length, seed=length)[0].tolist() for length in (4, 9, 6)]
REFUSED = (
    *("alibi", "kerple", "t5", "fire", "blend", "self_extend", "rerope", "leaky_rerope", "dual_chunk", "dynamic"),
    "longrope",
)
"""Schemes that ask where cached keys stand."""


def swapped(scheme: Any, name: str = "llama", **options: Any) -> Any:
    model = build(name)
    patch_model(model, scheme, max_length=64, site="attention", **options)
    return model


def is_refused(model: Any) -> bool:
    return "init_continuous_batching" in vars(model)


@pytest.mark.parametrize("scheme", ["alibi", "self_extend", "fire", "t5", {0: "rope", 1: "alibi"}], ids=str)
def test_what_asks_for_positions_of_cached_keys_is_refused_at_the_call(scheme: Any) -> None:
    model = swapped(scheme)
    message = r"LlamaForCausalLM was asked for continuous batching \(generate_batch\).*What works: generate; or"
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(UnsupportedSwapError, match=message):
            twin.generate_batch(PROMPTS, generation_config=SETTINGS)
        with pytest.raises(UnsupportedSwapError, match=message):
            twin.init_continuous_batching(generation_config=SETTINGS)
    unpatch_model(model)
    assert not is_refused(model)


def test_every_scheme_is_served_or_refused() -> None:
    refused = set()
    for name in SCHEMES:
        model = build("llama")
        options = stand_ins(name, locate(model).geometry)
        try:
            patch_model(model, name, max_length=64, site="attention", **options)
        except UnsupportedSwapError:  # a table: the model has none
            continue
        refused |= {name} if is_refused(model) else set()
    assert refused == set(REFUSED)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["rope", "xpos", "yarn"])
def test_what_is_served_says_what_generate_says(scheme: str) -> None:
    model = swapped(scheme)
    expected = []
    for prompt in PROMPTS:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        expected.append(out[0, len(prompt) :].tolist())
    little = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)  # otherwise it takes the machine's free memory
    found = model.generate_batch(PROMPTS, SETTINGS, continuous_batching_config=little, warmup=False)
    assert [request.error for request in found.values()] == [None] * 3
    assert [request.generated_tokens for request in found.values()] == expected
