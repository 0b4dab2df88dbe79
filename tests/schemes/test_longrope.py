"""LongRoPE's n-hat against the paper's formula in float64, and in a running model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from hf_posswap import patch_model, swap_plan, verify_swap
from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes import LongRope, make_scheme
from tests.stock import cache_in, with_cache

Geometries = Callable[..., Geometry]
DIVISORS = (1.0, 1.5, 3.0, 4.0)
ORIGINAL = 16


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=53,
        max_position_embeddings=ORIGINAL,
        initializer_range=0.4,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def logits(model: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **kwargs).logits


def turned(vector: list[float], position: int, n_hat: int, divisors: tuple[float, ...]) -> list[complex]:
    """Return the pairs (i, i + 4) of `vector` as complex numbers, each turned as equation 5 says."""
    pairs = [complex(vector[i], vector[i + 4]) for i in range(4)]
    thetas = [10000.0 ** (-2 * i / 8) for i in range(4)]
    angles = [position * t / (1.0 if position < n_hat else d) for t, d in zip(thetas, divisors, strict=True)]
    return [z * complex(math.cos(a), math.sin(a)) for z, a in zip(pairs, angles, strict=True)]


@given(n_hat=st.integers(0, 40), start=st.integers(0, 60), length=st.sampled_from([5, ORIGINAL, ORIGINAL + 1, 200]))
def test_scores_are_those_of_the_paper(geometry: Geometries, n_hat: int, start: int, length: int) -> None:
    shape = geometry(head_dim=8, original_length=ORIGINAL)
    scheme = LongRope(long_factor=DIVISORS, factor=4.0, attention_factor=1.25, original_positions=n_hat)
    mechanism = scheme.resolve(shape, None).mechanism(shape)
    query, key = torch.randn(2, 1, 1, 9, 8)
    positions = torch.arange(start, start + 9)[None]
    prepared = mechanism.prepare(positions, torch.tensor([[[[length]]]]))
    ours = mechanism.rotate_query(query, prepared) @ mechanism.rotate_key(key, prepared).mT
    divisors = DIVISORS if length > ORIGINAL else (1.0,) * 4
    for i in range(9):
        for j in range(9):
            q = turned(query[0, 0, i].tolist(), start + i, n_hat, divisors)
            k = turned(key[0, 0, j].tolist(), start + j, n_hat, divisors)
            expected = 1.25**2 * sum((a * b.conjugate()).real for a, b in zip(q, k, strict=True))
            assert ours[0, 0, i, j].item() == pytest.approx(expected, abs=2e-4)


def test_the_first_positions_have_plain_rope_s_logits() -> None:
    ids = torch.arange(1, 33)[None]  # twice the original length
    native, swapped = llama(), llama()
    options = {"long_factor": DIVISORS, "factor": 2.0, "attention_factor": 1.0}
    assert swap_plan(patch_model(swapped, "longrope", original_positions=8, **options)).route == "plugin"
    ours, plain = logits(swapped, ids), logits(native, ids)
    torch.testing.assert_close(ours[:, :8], plain[:, :8], rtol=0, atol=1e-5)
    assert (ours[:, 8] - plain[:, 8]).abs().max() > 1e-2  # the ninth token looks back with a divided angle


def test_none_of_them_is_native_and_relative_and_one_is_neither() -> None:
    native, ids = llama(), torch.arange(1, 33)[None]
    options: dict[str, Any] = {"long_factor": DIVISORS, "factor": 2.0}
    assert swap_plan(patch_model(native, "longrope", original_positions=0, **options)).route == "native"
    assert make_scheme("longrope", **options).traits.relative
    one = llama()
    plan = swap_plan(patch_model(one, "longrope", original_positions=8, **options))
    assert not plan.scheme.traits.relative
    positions = torch.arange(32)[None]
    here, there = (logits(one, ids, position_ids=positions + by) for by in (0, 4))
    assert (here - there).abs().max() > 1e-2
    verify_swap(one)


def test_steps_with_a_cache_equal_one_forward_beyond_the_original_length() -> None:
    model, ids = llama(), torch.arange(1, 31)[None]
    patch_model(model, "longrope", long_factor=DIVISORS, factor=2.0, original_positions=4)
    full = logits(model, ids)
    with torch.no_grad():
        first = model(input_ids=ids[:, :20], use_cache=True)
        second = model(input_ids=ids[:, 20:], **with_cache(model, cache_in(first))).logits
    # a step sees the long factors as the full forward does: raw keys are cached, and 20 > 16
    torch.testing.assert_close(second, full[:, 20:], rtol=0, atol=1e-5)


def test_a_record_keeps_it(geometry: Geometries) -> None:
    scheme = LongRope(long_factor=DIVISORS, factor=2.0, original_positions=8)
    assert make_scheme(scheme.to_dict()) == scheme


@pytest.mark.parametrize("value", [-1, 2.0, True, "4", 2**31 + 1, float("nan")])
def test_impossible_numbers_are_refused(value: Any) -> None:
    with pytest.raises(SchemeError, match=r"original_positions must be a whole number from 0 to 2147483648, got"):
        LongRope(long_factor=DIVISORS, factor=2.0, original_positions=value)
