"""Resonance RoPE and Resonance YaRN: the algorithm pair by pair in float64, and what its theorem promises."""

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
from hf_posswap.rope_math import cos_sin
from hf_posswap.schemes import Resonance, ResonanceYarn, RotaryScheme, Yarn

Geometries = Callable[..., Geometry]
WIDTHS = st.integers(2, 64).map(lambda half: 2 * half)
BASES = st.sampled_from([10000.0, 500000.0]) | st.floats(50.0, 1e7)


def stock(scheme: RotaryScheme, shape: Geometry) -> tuple[torch.Tensor, float]:
    """Return what transformers computes from the scheme's own config, within the original length and beyond."""
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.original_length,
        rope_parameters=scheme.native_rope(shape),
    )
    within, factor = ROPE_INIT_FUNCTIONS["longrope"](config)
    beyond, _ = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=shape.original_length + 1)
    assert torch.equal(within, beyond)
    return within, factor


@given(dim=WIDTHS, base=BASES)
def test_wavelengths_are_whole_and_the_nearest(geometry: Geometries, dim: int, base: float) -> None:
    shape = geometry(head_dim=dim)
    scheme = Resonance(base=base).resolve(shape, None)
    ours = scheme.angles(shape).inv_freq.double()
    for pair, theta in enumerate(ours.tolist()):
        wavelength, plain = 2 * math.pi / theta, 2 * math.pi * base ** (2 * pair / dim)
        assert wavelength == pytest.approx(round(wavelength), rel=2e-7)
        assert abs(wavelength - plain) <= 0.5 + 2e-6 * plain
    torch.testing.assert_close(stock(scheme, shape)[0].double(), ours, rtol=2e-6, atol=0)


@given(dim=WIDTHS, base=BASES, factor=st.floats(1.0, 32.0), original=st.integers(256, 8192))
def test_resonance_yarn_rounds_what_yarn_of_transformers_gives(
    geometry: Geometries, dim: int, base: float, factor: float, original: int
) -> None:
    shape = geometry(head_dim=dim, original_length=original)
    native = Yarn(base=base, factor=factor).resolve(shape, None).native_rope(shape)
    config = LlamaConfig(head_dim=dim, max_position_embeddings=original, rope_parameters=native)
    theirs, attention = ROPE_INIT_FUNCTIONS["yarn"](config)
    scheme = ResonanceYarn(base=base, factor=factor).resolve(shape, None)
    ours = scheme.angles(shape)
    gaps = (2 * math.pi / ours.inv_freq.double() - 2 * math.pi / theirs.double()).abs()
    assert (gaps <= 0.5 + 1e-5 * factor * 2 * math.pi / theirs.double()).all()
    wavelengths = 2 * math.pi / ours.inv_freq.double()
    torch.testing.assert_close(wavelengths, wavelengths.round(), rtol=2e-7, atol=0)
    assert ours.attention_factor == pytest.approx(attention, rel=1e-12)
    listed, factor_of_stock = stock(scheme, shape)
    torch.testing.assert_close(listed, ours.inv_freq, rtol=2e-6, atol=0)
    assert factor_of_stock == pytest.approx(attention, rel=1e-12)


def test_llama_s_shortest_and_longest_waves(geometry: Geometries) -> None:
    shape = geometry(head_dim=128)
    inv_freq = Resonance().resolve(shape, None).angles(shape).inv_freq.double()
    assert 2 * math.pi / inv_freq[0].item() == pytest.approx(6, rel=1e-6)  # 6.28 in the paper's section 3.1
    assert 2 * math.pi / inv_freq[-1].item() == pytest.approx(54410, rel=1e-6)  # 54410.14


def test_no_position_meets_an_angle_that_training_has_not_shown(geometry: Geometries) -> None:
    """Theorem 1: where the wavelength is below L, each feature past L is one from before it."""
    shape, trained, beyond = geometry(head_dim=64), 64, 256
    angles = Resonance().resolve(shape, None).angles(shape)
    short = int((2 * math.pi / angles.inv_freq < trained).sum())
    assert short == 9  # 2 pi 10^(i/8) stays below 64 up to i = 8
    table = cos_sin(torch.arange(beyond)[None], angles)
    points = torch.stack(table, dim=-1)[0, 0, :, :short].double()  # [P, pairs, 2]
    gaps = torch.cdist(points[trained:].transpose(0, 1), points[:trained].transpose(0, 1)).amin(dim=-1)
    assert gaps.max() < 1e-4
    plain = cos_sin(torch.arange(beyond)[None], angles._replace(inv_freq=10000.0 ** (-torch.arange(32) / 32)))
    points = torch.stack(plain, dim=-1)[0, 0, :, :short].double()
    gaps = torch.cdist(points[trained:].transpose(0, 1), points[:trained].transpose(0, 1)).amin(dim=-1)
    assert gaps.max() > 1e-2
