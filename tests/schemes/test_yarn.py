"""YaRN's own numbers: the ends of the ramp, the ramp, the temperatures, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.rope_math import default_inv_freq
from hf_posswap.schemes import Yarn
from hf_posswap.schemes.scaled import correction_dim, temperature

Geometries = Callable[..., Geometry]


# dim, base, L, and the ends of the ramp, from the paper's formula evaluated apart from this package
@pytest.mark.parametrize(
    ("dim", "base", "original", "low", "high"),
    [(128, 1e4, 4096, 20.944, 45.027), (64, 1e4, 2048, 8.064, 20.105), (128, 5e5, 8192, 18.081, 34.984)],
)
def test_ends_of_the_ramp_before_rounding(dim: int, base: float, original: int, low: float, high: float) -> None:
    assert correction_dim(32, dim, base, original) == pytest.approx(low, abs=5e-4)
    assert correction_dim(1, dim, base, original) == pytest.approx(high, abs=5e-4)


@pytest.mark.parametrize("rotations", [1, 7.5, 32])
def test_the_pair_at_the_correction_dim_turns_that_often(rotations: float) -> None:
    pair = correction_dim(rotations, 128, 10000.0, 4096)
    wavelength = 2 * torch.pi * 10000.0 ** (2 * pair / 128)
    assert 4096 / wavelength == pytest.approx(rotations, rel=1e-9)


@pytest.mark.parametrize(("factor", "published"), [(4, 1.1386), (16, 1.2773), (32, 1.3466)])
def test_temperatures_equal_the_published_ones(factor: float, published: float) -> None:
    assert temperature(factor) == pytest.approx(published, abs=5e-5)


def test_fast_pairs_are_kept_and_slow_ones_divided(geometry: Geometries) -> None:
    shape = geometry(head_dim=128, original_length=4096)
    inv_freq = Yarn(factor=16).resolve(shape, None).angles(shape).inv_freq
    plain = default_inv_freq(10000.0, 128)
    assert torch.equal(inv_freq[:21], plain[:21])  # 20.944 rounded down, inclusive: pairs 0..20
    torch.testing.assert_close(inv_freq[46:], plain[46:] / 16, rtol=2e-7, atol=0)  # 45.027 rounded up
    assert (inv_freq[21:46] < plain[21:46]).all()
    assert (inv_freq[21:46] > plain[21:46] / 16).all()


def test_factor_one_changes_nothing(geometry: Geometries) -> None:
    shape = geometry(original_length=4096)
    frequencies = Yarn(factor=1).resolve(shape, None).angles(shape)
    torch.testing.assert_close(frequencies.inv_freq, default_inv_freq(10000.0, 16), rtol=2e-7, atol=0)
    assert frequencies.attention_factor == 1.0


def test_deepseeks_scales_are_written_out_beside_the_factor_they_give(geometry: Geometries) -> None:
    shape = geometry(original_length=4096)
    plain = Yarn(factor=4).resolve(shape, None).native_rope(shape)
    assert "mscale" not in plain
    scheme = Yarn(factor=4, mscale=0.7, mscale_all_dim=0.5).resolve(shape, None)
    added = scheme.native_rope(shape).items() - plain.items()
    factor = (0.07 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert dict(added) == {"mscale": 0.7, "mscale_all_dim": 0.5, "attention_factor": pytest.approx(factor, rel=1e-12)}


def test_ramp_ends_that_fall_together_are_handled_as_transformers_does(geometry: Geometries) -> None:
    shape = geometry(head_dim=16, original_length=6)  # shorter than 2 pi tokens: no pair turns even once
    scheme = Yarn(factor=4).resolve(shape, None)
    assert scheme.ramp_ends(shape) == (0, 0)
    config = LlamaConfig(head_dim=16, max_position_embeddings=6, rope_parameters=scheme.native_rope(shape))
    theirs, _ = ROPE_INIT_FUNCTIONS["yarn"](config)
    ours = scheme.angles(shape).inv_freq
    torch.testing.assert_close(ours, theirs, rtol=2e-7, atol=0)
    assert scheme.interpolated(shape).tolist() == [0.0] + [1.0] * 7


def test_a_ramp_that_cannot_exist_is_refused(geometry: Geometries) -> None:
    with pytest.raises(
        SchemeError, match=r"no rotary pair turns between beta_slow=1 and beta_fast=32 .*original 4 tok"
    ):
        Yarn(factor=2, truncate=False).resolve(geometry(head_dim=64, original_length=4), None)
    with pytest.raises(SchemeError, match=r"base 2\), so there is no ramp; choose betas"):
        Yarn(factor=2, base=2.0).resolve(geometry(original_length=65536), None)
