"""NTK-by-parts and YaRN's variants against transformers' yarn and llama3, and the paper's formula pair by pair."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_posswap.geometry import Geometry
from hf_posswap.schemes import Llama3, NTKByParts, RotaryScheme, Yarn

Geometries = Callable[..., Geometry]
WIDTHS = st.integers(2, 64).map(lambda half: 2 * half)
BASES = st.sampled_from([10000.0, 500000.0]) | st.floats(100.0, 1e7)
FACTORS = st.sampled_from([1.0, 4.0]) | st.floats(1.0, 64.0)
LENGTHS = st.integers(256, 32768)


def stock(scheme: RotaryScheme, shape: Geometry) -> tuple[torch.Tensor, float]:
    """Return what transformers computes from the scheme's own config."""
    native = scheme.native_rope(shape)
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.original_length,
        rope_parameters=native,
    )
    return ROPE_INIT_FUNCTIONS[native["rope_type"]](config)


def by_formula(dim: int, base: float, factor: float, original: int, ramp: str, mix: str) -> torch.Tensor:
    """Return theta' in float64, pair by pair, with the paper's betas of 1 and 32."""
    low = max(math.floor(dim * math.log(original / (32 * 2 * math.pi)) / (2 * math.log(base))), 0)
    high = min(math.ceil(dim * math.log(original / (2 * math.pi)) / (2 * math.log(base))), dim - 1)
    out = []
    for pair in range(dim // 2):
        wavelength = 2 * math.pi * base ** (2 * pair / dim)
        if ramp == "turns":
            kept = (original / wavelength - 1) / (32 - 1)
        else:
            kept = 1 - (pair - low) / (high - low if high > low else 0.001)
        kept = min(1.0, max(0.0, kept))
        if mix == "frequencies":
            out.append(kept * 2 * math.pi / wavelength + (1 - kept) * 2 * math.pi / (factor * wavelength))
        else:
            out.append(2 * math.pi / (kept * wavelength + (1 - kept) * factor * wavelength))
    return torch.tensor(out, dtype=torch.float64)


@given(dim=WIDTHS, base=BASES, factor=FACTORS, original=LENGTHS, truncate=st.booleans())
def test_it_is_transformers_yarn_without_temperature(
    geometry: Geometries, dim: int, base: float, factor: float, original: int, truncate: bool
) -> None:
    shape = geometry(head_dim=dim, original_length=original)
    scheme = NTKByParts(base=base, factor=factor, truncate=truncate).resolve(shape, None)
    ours, (theirs, sharpened) = scheme.angles(shape), stock(scheme, shape)
    assert scheme.native_rope(shape)["rope_type"] == "yarn"
    torch.testing.assert_close(ours.inv_freq, theirs, rtol=1e-6 * factor, atol=0)
    assert ours.attention_factor == sharpened == 1.0


@pytest.mark.parametrize("ramp", ["index", "turns"])
@pytest.mark.parametrize("mix", ["frequencies", "wavelengths"])
@given(dim=WIDTHS, base=BASES, factor=FACTORS, original=LENGTHS)
def test_every_variant_is_its_formula_and_has_a_stock_config(
    geometry: Geometries, ramp: str, mix: str, dim: int, base: float, factor: float, original: int
) -> None:
    shape = geometry(head_dim=dim, original_length=original)
    exact = by_formula(dim, base, factor, original, ramp, mix)
    # float32 rounds the ramp by some 1e-7 of its largest term (turns: up to L/2 pi over 31), the factor stretches that
    near = 2e-6 * factor * (1 + (original / 200 if ramp == "turns" else 0))
    for kind, sharpened in ((NTKByParts, 1.0), (Yarn, 1.0 + 0.1 * math.log(factor))):
        scheme = kind(base=base, factor=factor, ramp=ramp, mix=mix).resolve(shape, None)
        ours = scheme.angles(shape)
        torch.testing.assert_close(ours.inv_freq.double(), exact, rtol=near, atol=0)
        theirs, factor_of_stock = stock(scheme, shape)
        torch.testing.assert_close(theirs, ours.inv_freq, rtol=2e-6 * factor, atol=0)
        assert ours.attention_factor == pytest.approx(sharpened, rel=1e-12)
        assert factor_of_stock == pytest.approx(sharpened, rel=1e-12)


@given(dim=WIDTHS, base=BASES, factor=FACTORS, original=LENGTHS)
def test_a_ramp_over_turns_with_llama_3_s_ends_is_llama_3(
    geometry: Geometries, dim: int, base: float, factor: float, original: int
) -> None:
    shape = geometry(head_dim=dim, original_length=original)
    scheme = NTKByParts(base=base, factor=factor, beta_slow=1, beta_fast=4, ramp="turns").resolve(shape, None)
    theirs, _ = stock(Llama3(base=base, factor=factor).resolve(shape, None), shape)
    torch.testing.assert_close(scheme.angles(shape).inv_freq, theirs, rtol=2e-6 * factor, atol=0)


def test_every_variant_gives_other_frequencies(geometry: Geometries) -> None:
    shape = geometry(head_dim=64, original_length=4096)
    found = {
        tuple(NTKByParts(factor=8, ramp=ramp, mix=mix).resolve(shape, None).angles(shape).inv_freq.tolist())
        for ramp in ("index", "turns")
        for mix in ("frequencies", "wavelengths")
    }
    assert len(found) == 4


def test_a_ramp_over_turns_needs_no_pair_between_the_betas(geometry: Geometries) -> None:
    shape = geometry(head_dim=4, original_length=128)  # its two pairs turn 20.4 and 0.2 times
    scheme = NTKByParts(factor=4, beta_slow=2, beta_fast=3, ramp="turns", truncate=False).resolve(shape, None)
    torch.testing.assert_close(scheme.angles(shape).inv_freq, torch.tensor([1.0, 0.0025]), rtol=1e-6, atol=0)


def test_deepseek_s_scales_are_no_part_of_a_list(geometry: Geometries) -> None:
    shape = geometry(original_length=4096)
    scheme = Yarn(factor=4, mscale=0.7, mscale_all_dim=0.5, mix="wavelengths").resolve(shape, None)
    native = scheme.native_rope(shape)
    assert native["rope_type"] == "longrope"
    assert "mscale" not in native
    assert native["attention_factor"] == scheme.attention_factor
