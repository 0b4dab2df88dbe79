"""Continuous batching of swapped models: true answers, or a refusal at the call and not in a worker thread."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import continuous_api

from hf_posswap import load, patch_model, swap_plan, unpatch_model
from hf_posswap.compat.transformers_calls import tells_paged_positions
from hf_posswap.errors import SchemeError, UnsupportedSwapError
from hf_posswap.families.locating import locate
from hf_posswap.patching.edits import continuous_batching
from hf_posswap.patching.edits.continuous_batching import why_not_paged
from hf_posswap.patching.inspect.describe import stand_ins
from hf_posswap.patching.sites.attention import backends
from hf_posswap.schemes import SCHEMES
from hf_posswap.schemes.mechanism import Mechanism
from tests.contract.models import build
from tests.contract.pairs import words

SETTINGS = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=1)
PROMPTS = [words(1, length, seed=length)[0].tolist() for length in (4, 30, 6, 40)]
REFUSED = {"dynamic", "longrope"}
"""Schemes whose angles follow the length."""
ASKING = {"alibi", "kerple", "t5", "fire", "blend", "self_extend", "rerope", "leaky_rerope", "dual_chunk", "sum"}
"""Schemes that ask where cached keys stand, which a release before 5.19 does not tell."""
if not tells_paged_positions():
    REFUSED |= ASKING
UNMADE = {"string"}
"""Schemes whose stand-ins do not fit so short a model."""
PICTURES = {"alibi_2d", "learned_2d", "rope_2d", "sinusoidal_2d"}
TABLES = PICTURES | {"learned", "sinusoidal", "together"}


def swapped(scheme: Any, name: str = "llama", **options: Any) -> Any:
    model = build(name)
    patch_model(model, scheme, max_length=64, site="attention", **options)
    return model


def is_refused(model: Any) -> bool:
    return "init_continuous_batching" in vars(model)


@pytest.mark.parametrize("scheme", ["alibi", "self_extend", {0: "rope", 1: "alibi"}], ids=str)
def test_a_release_that_does_not_tell_where_keys_stand_is_refused_at_the_call(
    scheme: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuous_batching, "tells_paged_positions", lambda: False)
    model = swapped(scheme)
    message = r"LlamaForCausalLM was asked for continuous batching \(generate_batch\).*What works: generate; or"
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(UnsupportedSwapError, match=message):
            twin.generate_batch(PROMPTS, generation_config=SETTINGS)
        with pytest.raises(UnsupportedSwapError, match=message):
            twin.init_continuous_batching(generation_config=SETTINGS)
    unpatch_model(model)
    assert not is_refused(model)


@pytest.mark.skipif(not tells_paged_positions(), reason="all of them are refused")
def test_keys_that_only_a_kernel_reads_are_refused() -> None:
    pages, known = {"block_table": torch.zeros(1, 1)}, {"block_table": None}
    for scheme in ("alibi", "self_extend", "rope"):
        mechanism = next(module for module in swapped(scheme).modules() if isinstance(module, Mechanism))
        assert why_not_paged(mechanism, known) is None
        assert why_not_paged(mechanism, pages) == (None if scheme == "rope" else continuous_batching.KEYS_UNKNOWN)


def test_every_scheme_is_served_or_refused() -> None:
    assert set(served("llama", "attention")) == set(SCHEMES) - REFUSED - TABLES - UNMADE
    assert set(served("llama", "auto")) == set(SCHEMES) - REFUSED - TABLES - UNMADE
    assert set(served("gpt2", "auto")) == set(SCHEMES) - REFUSED - PICTURES - UNMADE - {"blend"}


def served(name: str, site: Any) -> dict[str, Any]:
    """Return the swapped models that do not refuse, by their scheme."""
    found = {}
    for scheme in SCHEMES:
        model = build(name)
        options = stand_ins(scheme, locate(model).geometry)
        try:
            patch_model(model, scheme, max_length=64, site=site, **options)
        except (UnsupportedSwapError, SchemeError):  # a table: the model has none; a blend cannot lengthen one
            continue
        if not is_refused(model):
            found[scheme] = model
    return found


@pytest.mark.parametrize("scheme", ["dynamic", "longrope"])
def test_stock_angles_that_follow_the_longest_request_are_refused(scheme: str, tmp_path: Path) -> None:
    model = build("llama")
    native = "init_continuous_batching" in dir(model)
    options = stand_ins(scheme, locate(model).geometry)
    patch_model(model, scheme, max_length=64, **options)
    assert swap_plan(model).route == "native"
    model.save_pretrained(tmp_path)
    for twin in (model, copy.deepcopy(model), load(tmp_path)):
        with pytest.raises(UnsupportedSwapError, match="those of the longest one. What works: generate"):
            twin.generate_batch(PROMPTS, generation_config=SETTINGS)
    unpatch_model(model)
    assert native
    assert not is_refused(model)


def says_what_generate_says(model: Any) -> bool:
    """Return whether prompts within and beyond the original length, and far shorter ones beside them, go on alike."""
    # without it it takes the free memory of the machine
    little = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    expected = []
    for prompt in PROMPTS:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        expected.append(out[0, len(prompt) :].tolist())
    found = model.generate_batch(PROMPTS, SETTINGS, continuous_batching_config=little, warmup=False)
    return [(request.error, request.generated_tokens) for request in found.values()] == [(None, e) for e in expected]


@pytest.mark.skipif(not tells_paged_positions(), reason="transformers tells where cached keys stand from 5.19 on")
@pytest.mark.parametrize("scheme", ["alibi", "self_extend"])
def test_eager_attention_is_served_too(scheme: str) -> None:
    model = swapped(scheme)
    model.set_attn_implementation("eager")
    assert says_what_generate_says(model)


@pytest.mark.skipif(not tells_paged_positions(), reason="transformers tells where cached keys stand from 5.19 on")
@pytest.mark.parametrize("scheme", ["alibi", "self_extend"])
def test_where_there_is_flash_attention_it_is_not_switched_to(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes it where it finds it, which is a GPU's; here it is told that it is there."""
    monkeypatch.setattr(continuous_api, "is_flash_attn_3_available", lambda **_: True)
    model = swapped(scheme)
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert says_what_generate_says(twin)
    unpatch_model(model)
    assert model._supports_flash_attn
    assert "_supports_flash_attn" not in vars(model)
    assert swapped("rope")._supports_flash_attn


@pytest.mark.skipif(not tells_paged_positions(), reason="transformers tells where cached keys stand from 5.19 on")
@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("scheme", ["alibi", "self_extend", {0: "rope", 1: "alibi"}], ids=str)
def test_positions_of_cached_keys_are_each_request_s(scheme: Any, name: str) -> None:
    """A Mistral's paged cache holds as many keys as its window alone."""
    assert says_what_generate_says(swapped(scheme, name))


@pytest.mark.skipif(not tells_paged_positions(), reason="transformers tells where cached keys stand from 5.19 on")
@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize(
    ("scheme", "way"), [("alibi", "row_windowed"), ("t5", "hankel"), ("self_extend", "merge"), ("fire", "chunked")]
)
def test_long_prompts_take_the_fast_way(scheme: str, way: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    attend = backends.WAYS[way]
    monkeypatch.setitem(backends.WAYS, way, lambda request, pieces: taken.append(way) or attend(request, pieces))
    model = build(name)
    patch_model(model, scheme, max_length=2048, site="attention")
    prompts = [words(1, length, seed=length)[0].tolist() for length in (700, 5, 420)]
    with monkeypatch.context() as alone:
        alone.setattr(backends, "MIN_QK_PAIRS", 2**40)  # generate reads by the formula
        expected = [model.generate(torch.tensor([p]), max_new_tokens=6, do_sample=False)[0, len(p) :] for p in prompts]
    assert not taken
    config = ContinuousBatchingConfig(num_blocks=128, max_batch_tokens=2048)
    found = model.generate_batch(prompts, SETTINGS, continuous_batching_config=config, warmup=False)
    assert [request.generated_tokens for request in found.values()] == [tokens.tolist() for tokens in expected]
    assert taken


def test_a_scheme_for_causal_models_is_served() -> None:
    """transformers calls the model with is_causal=False there, and with a mask that is causal."""
    assert says_what_generate_says(swapped("xpos"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_what_is_served_says_what_generate_says(name: str) -> None:
    wrong = [scheme for scheme, model in served(name, "auto").items() if not says_what_generate_says(model)]
    assert not wrong
