"""`verify_swap` sees mechanisms of models that are hardly trained, and the lack of one, whatever the weights' size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import LayerNorm
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from hf_posswap import patch_model, verify_swap
from hf_posswap.errors import SwapVerificationError
from hf_posswap.patching.verify import probe, token_probe
from hf_posswap.patching.verify.probe import NoEffectSeen, finer, noise_of
from hf_posswap.patching.verify.token_probe import token_probe as make_probe
from hf_posswap.testing.tiny import tiny_model

SIZES = st.floats(-2.6, -0.5).map(lambda power: 10**power)  # of weights: 0.0025 to 0.3
SEEDS = st.integers(0, 2**16)


def encoder(size: float, seed: int, **options: Any) -> Any:
    """Return a random BERT whose weights have the standard deviation `size`."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = BertConfig(**shape, vocab_size=97, max_position_embeddings=64, initializer_range=size, **options)
    return BertForMaskedLM(config).eval()


def decoder(size: float, seed: int) -> Any:
    """Return a random GPT-2 whose weights have the standard deviation `size`."""
    torch.manual_seed(seed)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**shape, initializer_range=size)).eval()


def unchanged(x: Any, prepared: Any) -> Any:
    return x


def deafen(model: Any) -> None:
    """Let the swapped model turn nothing: its structure is as planned, and it has no positions."""
    mechanism = model.base_model.posswap
    mechanism.rotate_query = mechanism.rotate_key = unchanged


@pytest.mark.parametrize("build", [encoder, decoder])
@pytest.mark.parametrize("scheme", ["rope", "alibi"])
@settings(max_examples=12, deadline=None)
@given(size=SIZES, seed=SEEDS)
def test_a_weak_mechanism_is_one(build: Callable[..., Any], scheme: str, size: float, seed: int) -> None:
    model = build(size, seed)
    patch_model(model, scheme)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    verify_swap(model, seed=seed)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.dtype == torch.float32


@pytest.mark.parametrize("build", [encoder, decoder])
@settings(max_examples=12, deadline=None)
@given(size=SIZES, seed=SEEDS)
def test_a_mechanism_without_effect_is_refused_at_any_size(build: Callable[..., Any], size: float, seed: int) -> None:
    model = build(size, seed)
    patch_model(model, "rope")
    deafen(model)
    with pytest.raises(SwapVerificationError, match="do not depend on the position ids") as caught:
        verify_swap(model, seed=seed)
    assert type(caught.value) is not NoEffectSeen


@settings(max_examples=12, deadline=None)
@given(size=SIZES, seed=SEEDS)
def test_the_order_of_tokens_alone_shows_it_too(size: float, seed: int) -> None:
    """An encoder that is not told of positions: sums in another order are all that its tokens' order changes."""
    model = encoder(size, seed, attn_implementation="eager")
    patch_model(model, "rope")
    deafen(model)
    for one in (model, finer(model)):
        probe = make_probe(one, 12, seed)
        with torch.no_grad():
            logits = probe.at(one, probe.near)
            bound = noise_of(one, float(logits.abs().max()), 0.0, torch.float32)
            with pytest.raises(NoEffectSeen, match="do not depend on the order of the tokens"):
                token_probe._order(one, one._posswap.plan, probe, bound)


def test_what_half_precision_hides_is_found_in_a_finer_copy() -> None:
    model = encoder(0.01, 0).to(torch.bfloat16)
    patch_model(model, "rope")
    assert "in float64: torch.bfloat16 hides so weak a mechanism" in verify_swap(model).checks["finite"]
    strong = encoder(0.2, 0)
    patch_model(strong, "rope")
    assert "float64" not in verify_swap(strong).checks["finite"]


def coarse(module: Any, args: Any, out: Any) -> Any:
    """Round as a quantized layer does that computes in bfloat16."""
    return out.bfloat16().float()


@pytest.mark.parametrize("seed", [0, 10])
def test_layers_that_round_are_no_lack_of_a_relative_scheme(seed: int) -> None:
    model = decoder(0.6, seed)
    for module in model.modules():
        if isinstance(module, LayerNorm | Conv1D):
            module.register_forward_hook(coarse)
    patch_model(model, "rope")
    verify_swap(model, seed=seed)
    model.transformer.posswap.rotate_key = unchanged
    with pytest.raises(SwapVerificationError, match="shifting all positions by 52 moves the logits"):
        verify_swap(model, seed=seed)


def test_no_copy_is_made_of_what_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LARGEST_COPY", 100)
    model = encoder(0.003, 0)
    patch_model(model, "rope")
    assert finer(model) is None
    with pytest.raises(SwapVerificationError, match="the logits do not depend on"):
        verify_swap(model)


def test_a_copy_in_float64_runs_where_experts_are_multiplied_in_groups() -> None:
    model, ids = tiny_model("mixtral", meta=False), torch.randint(5, 90, (2, 12))
    patch_model(model, "rope", base=5000.0)
    copied = finer(model)
    with torch.no_grad():
        found, expected = copied(input_ids=ids).logits, model(input_ids=ids).logits
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected.double(), atol=1e-4, rtol=0)
