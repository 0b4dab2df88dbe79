"""xPos against its formula in float64 by brute force, in the cache and out of it, and up to where float32 holds it."""

from __future__ import annotations

import cmath
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from hf_posswap import patch_model, plan_swap
from hf_posswap.errors import PositionRangeError, SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes import Rope, XPos
from tests.stock import cache_in, with_cache

Geometries = Callable[..., Geometry]


def scores(scheme: XPos | Rope, shape: Geometry, q: torch.Tensor, k: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return q k of the mechanism, [Q, K], of q and k [Q, D] at the positions `at` [Q]."""
    mechanism = scheme.mechanism(shape)
    prepared = mechanism.prepare(at[None], torch.tensor([[[[int(at.max()) + 1]]]]))
    q, k = mechanism.rotate_query(q[None, None], prepared), mechanism.rotate_key(k[None, None], prepared)
    return (q @ k.mT)[0, 0]


def by_formula(q: torch.Tensor, k: torch.Tensor, distance: int, base: float, gamma: float, scale_base: float) -> float:
    """Return sum_i Re[q_i conj(k_i) e^(i distance theta_i)] zeta_i^(distance / scale_base), half-split pairs."""
    pairs, total = len(q) // 2, 0.0
    for i in range(pairs):
        zeta = (2 * i / len(q) + gamma) / (1 + gamma)
        turned = complex(q[i], q[i + pairs]) * complex(k[i], k[i + pairs]).conjugate()
        turned *= cmath.exp(1j * distance * base ** (-2 * i / len(q)))
        total += turned.real * zeta ** (distance / scale_base)
    return total


@given(
    half=st.integers(1, 20),
    base=st.sampled_from([100.0, 10000.0, 5e5]),
    gamma=st.sampled_from([0.4, 0.1, 2.0]),
    scale_base=st.sampled_from([512.0, 64.0]),
    start=st.integers(0, 600),
)
def test_every_score_is_the_formula_of_its_distance(
    geometry: Geometries, half: int, base: float, gamma: float, scale_base: float, start: int
) -> None:
    shape = geometry(head_dim=2 * half)
    scheme = XPos(base=base, gamma=gamma, scale_base=scale_base).resolve(shape, None)
    q, k = torch.randn(2, 6, 2 * half)
    at = torch.tensor([0, 1, 2, 17, 100, 300]) + start
    found = scores(scheme, shape, q, k, at)
    for row in range(6):
        for column in range(row + 1):
            distance = int(at[row] - at[column])
            exact = by_formula(q[row].double(), k[column].double(), distance, base, gamma, scale_base)
            assert found[row, column].item() == pytest.approx(exact, abs=2e-3)


def test_a_flat_decay_is_rope(geometry: Geometries) -> None:
    shape = geometry()
    q, k = torch.randn(2, 9, 16)
    at = torch.arange(9) + 90
    flat = scores(XPos(scale_base=1e12).resolve(shape, None), shape, q, k, at)
    torch.testing.assert_close(flat, scores(Rope().resolve(shape, None), shape, q, k, at), rtol=0, atol=1e-5)


@pytest.mark.parametrize("max_length", [None, 64, 1000, 4001])
def test_the_centre_is_half_the_length_and_cancels(geometry: Geometries, max_length: int | None) -> None:
    shape = geometry()
    scheme = XPos().resolve(shape, max_length)
    assert scheme.centre == max(128, max_length or 0) // 2
    q, k = torch.randn(2, 9, 16)
    at = torch.arange(9) + 90
    here = scores(scheme, shape, q, k, at)
    elsewhere = scores(XPos(centre=2000).resolve(shape, max_length), shape, q, k, at)
    torch.testing.assert_close(here, elsewhere, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "least"),
    [(torch.float64, 33_000), (torch.float32, 33_000), (torch.bfloat16, 33_000), (torch.float16, 2_200)],
)
def test_to_both_sides_of_the_centre_as_far_as_the_dtype_holds(
    geometry: Geometries, dtype: torch.dtype, least: int
) -> None:
    shape = geometry(original_length=64)
    scheme = XPos(centre=32).resolve(shape, None)
    limit = scheme.largest_position(shape, dtype)
    assert least < limit < 1.1 * least
    q, k = torch.randn(2, 3, 16).to(dtype)
    near = scores(scheme, shape, q, k, torch.tensor([32, 33, 35]))
    far = scores(scheme, shape, q, k, torch.tensor([limit + 29, limit + 30, limit + 32]))
    loose = {torch.float64: 0.05, torch.float32: 0.05, torch.bfloat16: 0.5, torch.float16: 0.1}[dtype]
    torch.testing.assert_close(far.tril(), near.tril(), rtol=0, atol=loose)
    problem = rf"lies {limit + 1} tokens from centre=32, and in .* hold for {limit}"
    with pytest.raises(PositionRangeError, match=problem):
        scores(scheme, shape, q, k, torch.tensor([limit + 33]))


def test_a_length_that_float32_cannot_hold_is_refused_when_planned(geometry: Geometries) -> None:
    assert XPos().resolve(geometry(), 60_000).centre == 30_000
    with pytest.raises(SchemeError, match=r"xpos: float32 holds its factors up to 33\d\d\d positions .* 100000 tokens"):
        XPos().resolve(geometry(), 100_000)
    assert XPos(scale_base=1024).resolve(geometry(), 100_000).centre == 50_000
    with pytest.raises(SchemeError, match="around centre=50000 reach 50000"):
        XPos(centre=50_000).resolve(geometry(), None)


def test_in_a_model_the_cache_and_one_forward_agree_and_the_end_is_an_error() -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=23, n_positions=32, initializer_range=0.3)
    model = GPT2LMHeadModel(config).eval()
    assert not plan_swap(model, "xpos").scheme.traits.unbounded
    patch_model(model, "xpos", max_length=128, scale_base=16)
    ids = torch.randint(0, 23, (1, 128))
    with torch.no_grad():
        full = model(input_ids=ids).logits
        cache = cache_in(model(input_ids=ids[:, :100], use_cache=True))
        steps = [
            model(input_ids=ids[:, [i]], **with_cache(model, cache), use_cache=True).logits for i in range(100, 128)
        ]
    torch.testing.assert_close(torch.cat(steps, dim=1), full[:, 100:], rtol=0, atol=5e-5)
    with torch.no_grad(), pytest.raises(PositionRangeError, match="larger scale_base"):
        model(input_ids=torch.randint(0, 23, (1, 1200)))
