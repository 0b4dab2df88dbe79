"""A swapped model's memory is freed at once, as a stock model's: on a GPU no search for garbage comes in time."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posswap import load, patch_model, unpatch_model
from hf_posswap.testing.tiny import tiny_model

SWAPS: list[tuple[str, str, dict[str, Any]]] = [
    ("GPT2LMHeadModel", "rope", {"max_length": 64}),
    ("GPT2LMHeadModel", "alibi", {}),
    ("GPT2LMHeadModel", "learned", {"max_length": 64}),
    ("OPTForCausalLM", "fire", {}),
    ("GPTJForCausalLM", "alibi", {}),
    ("BloomForCausalLM", "rope", {}),
    ("FalconForCausalLM", "self_extend", {"group": 4}),
    ("LlamaForCausalLM", "yarn", {"factor": 4.0}),
    ("LlamaForCausalLM", "kerple", {}),
    ("MistralForCausalLM", "dual_chunk", {"chunk": 16, "local": 4}),
    ("Gemma2ForCausalLM", "nope", {}),
    ("BertForMaskedLM", "rope", {}),
    ("DebertaV2ForMaskedLM", "rope", {}),
    ("MPNetForMaskedLM", "rope", {}),
    ("T5ForConditionalGeneration", "rope", {}),
    ("BartForConditionalGeneration", "alibi", {}),
    ("ViTForImageClassification", "rope_2d", {}),
    ("ViTForImageClassification", "sinusoidal_2d", {}),
]
swaps = pytest.mark.parametrize(("kind", "scheme", "options"), SWAPS)


@pytest.fixture(autouse=True)
def _nobody_searches_for_garbage() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def run(model: PreTrainedModel) -> Tensor:
    if model.main_input_name == "pixel_values":
        size = model.config.image_size
        return model(torch.ones(1, model.config.num_channels, size, size)).logits
    ids = torch.arange(3, 11)[None]
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return model(ids, **more).logits


def alive(make: Callable[[], Any]) -> list[str]:
    """Return the names of parts of what `make` gives that are in memory once nobody holds it."""
    model = make()
    with torch.no_grad():
        run(model)
    parts = {name: weakref.ref(part) for name, part in model.named_modules()}
    parts |= {name: weakref.ref(weight) for name, weight in model.named_parameters()}
    del model
    return [name for name, part in parts.items() if part() is not None]


@swaps
def test_a_swapped_model_is_freed_at_once(kind: str, scheme: str, options: dict[str, Any]) -> None:
    assert alive(lambda: tiny_model(kind, meta=False)) == []  # the stock model
    assert alive(lambda: patch_model(tiny_model(kind, meta=False), scheme, **options)) == []


@swaps
def test_a_copy_and_an_unpatched_model_are_freed_at_once(kind: str, scheme: str, options: dict[str, Any]) -> None:
    swapped = patch_model(tiny_model(kind, meta=False), scheme, **options)
    expected = run(swapped)
    assert alive(lambda: copy.deepcopy(swapped)) == []
    assert alive(lambda: unpatch_model(copy.deepcopy(swapped))) == []
    assert alive(lambda: pickle.loads(pickle.dumps(swapped))) == []
    assert torch.equal(run(swapped), expected)


@pytest.mark.parametrize("scheme", ["alibi", "yarn"])
def test_a_loaded_model_is_freed_at_once(scheme: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"factor": 4.0} if scheme == "yarn" else {}
    patch_model(tiny_model("LlamaForCausalLM", meta=False), scheme, **options).save_pretrained(tmp_path)
    assert alive(lambda: load(tmp_path)) == []


def test_a_copy_looks_its_mechanism_up_in_itself() -> None:
    """Its own learned biases are what a copy, or what was pickled, attends with; the original keeps its own."""
    swapped = patch_model(tiny_model("LlamaForCausalLM", meta=False), "t5")
    before = run(swapped)
    for copied in (copy.deepcopy(swapped), pickle.loads(pickle.dumps(swapped))):
        with torch.no_grad():
            for weight in copied.model.posswap.parameters():
                weight.mul_(2.0).add_(torch.arange(weight.shape[-1]))
        assert not torch.equal(run(copied), before)
        assert torch.equal(run(swapped), before)


def test_layers_run_on_when_their_model_is_gone() -> None:
    """Somebody may take the layers out of a model: they attend as they did in it."""
    model = patch_model(tiny_model("LlamaForCausalLM", meta=False), "alibi")
    hidden = torch.randn(1, 8, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    at = torch.arange(8)[None]
    angles = model.model.rotary_emb(hidden, at)
    layer = model.model.layers[0]

    def attended(one: Any) -> Tensor:
        found = one(hidden, position_ids=at, position_embeddings=angles)
        return found[0] if isinstance(found, tuple) else found

    expected = attended(layer)
    alone = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    del model
    for one in (layer, *alone):
        assert torch.equal(attended(one), expected)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["alibi", "rope"])
def test_what_is_compiled_attends_as_before(scheme: str) -> None:
    model = patch_model(
        tiny_model("LlamaForCausalLM", meta=False), scheme, **({"base": 500.0} if scheme == "rope" else {})
    )
    expected = run(model)
    found = run(torch.compile(model, backend="eager", fullgraph=True))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
