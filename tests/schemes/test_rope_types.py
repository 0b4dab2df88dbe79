"""Every rotary scheme against transformers' own rope functions, given the scheme's own `native_rope`.

Bounds: default, linear and ntk are equal bit by bit. yarn, llama3 and longrope differ by the order of float32
operations: at most 1e-6 of the unscaled frequency. dynamic takes its base in float32, transformers in float64:
2e-6 relative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import GPTNeoXConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_posswap import patch_model
from hf_posswap.geometry import Geometry
from hf_posswap.rope_math import Frequencies, default_inv_freq
from hf_posswap.schemes import NTK, Dynamic, Linear, Llama3, LongRope, Rope, RotaryScheme, Yarn

Geometries = Callable[..., Geometry]

WIDTHS = st.integers(2, 64).map(lambda half: 2 * half)
BASES = st.sampled_from([100.0, 10000.0, 10000, 500000.0, 1e6]) | st.floats(50.0, 1e7)
FACTORS = st.sampled_from([1.0, 2.0, 4.0, 8.0, 32.0]) | st.floats(1.0, 64.0)
LENGTHS = st.sampled_from([128, 512, 2048, 4096, 8192]) | st.integers(64, 32768)


def llama_config(scheme: RotaryScheme, geometry: Geometry) -> LlamaConfig:
    """Return the stock config that the scheme says computes the same."""
    native = dict(scheme.native_rope(geometry) or {})
    if scheme.rotary_dim(geometry) != geometry.head_dim:
        native["partial_rotary_factor"] = scheme.partial
    return LlamaConfig(
        hidden_size=geometry.hidden_size,
        num_attention_heads=geometry.num_heads,
        head_dim=geometry.head_dim,
        max_position_embeddings=geometry.original_length,
        rope_parameters=native,
    )


def stock(scheme: RotaryScheme, geometry: Geometry, length: int | None = None) -> Frequencies:
    """Return what transformers computes for the scheme."""
    config = llama_config(scheme, geometry)
    rope_type = config.rope_parameters["rope_type"]
    if rope_type == "default":
        return Frequencies(*LlamaRotaryEmbedding.compute_default_rope_parameters(config))
    return Frequencies(*ROPE_INIT_FUNCTIONS[rope_type](config, device=torch.device("cpu"), seq_len=length))


def assert_near(ours: Frequencies, theirs: Frequencies, unscaled: Tensor) -> None:
    assert ours.inv_freq.dtype == torch.float32
    assert ours.inv_freq.shape == theirs.inv_freq.shape
    assert ((ours.inv_freq - theirs.inv_freq).abs() <= 1e-6 * unscaled).all()
    assert ours.attention_factor == pytest.approx(theirs.attention_factor, rel=1e-12)


@given(dim=WIDTHS, base=BASES)
def test_rope_is_the_default_bit_by_bit(geometry: Geometries, dim: int, base: float) -> None:
    shape = geometry(head_dim=dim)
    scheme = Rope(base=base).resolve(shape, None)
    ours, theirs = scheme.angles(shape), stock(scheme, shape)
    assert torch.equal(ours.inv_freq, theirs.inv_freq)
    assert ours.attention_factor == theirs.attention_factor == 1.0


@pytest.mark.parametrize(("head_dim", "partial"), [(64, 0.25), (80, 0.25), (16, 0.5), (128, 1.0), (96, 0.4)])
def test_partial_rope_is_gpt_neox_bit_by_bit(geometry: Geometries, head_dim: int, partial: float) -> None:
    config = GPTNeoXConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": partial},
    )
    theirs, _ = GPTNeoXRotaryEmbedding.compute_default_rope_parameters(config)
    shape = geometry(head_dim=head_dim)
    scheme = Rope(partial=partial).resolve(shape, None)
    assert torch.equal(scheme.angles(shape).inv_freq, theirs)


@given(dim=WIDTHS, base=BASES, factor=FACTORS)
def test_linear_equals_stock_frequencies(geometry: Geometries, dim: int, base: float, factor: float) -> None:
    shape = geometry(head_dim=dim)
    scheme = Linear(base=base, factor=factor).resolve(shape, None)
    assert torch.equal(scheme.angles(shape).inv_freq, stock(scheme, shape).inv_freq)


@given(dim=WIDTHS, base=BASES, factor=FACTORS)
def test_ntk_equals_stock_and_the_papers_formula(geometry: Geometries, dim: int, base: float, factor: float) -> None:
    shape = geometry(head_dim=dim)
    scheme = NTK(base=base, factor=factor).resolve(shape, None)
    ours = scheme.angles(shape).inv_freq
    assert torch.equal(ours, stock(scheme, shape).inv_freq)
    raised = base * math.pow(factor, dim / (dim - 2))  # the paper's formula, pair by pair, in float64
    exact = torch.tensor([math.pow(raised, -2 * pair / dim) for pair in range(dim // 2)], dtype=torch.float64)
    torch.testing.assert_close(ours.double(), exact, rtol=2e-6, atol=0)


@given(
    dim=WIDTHS,
    base=BASES,
    factor=FACTORS,
    original=LENGTHS,
    lengths=st.lists(st.integers(1, 200_000), min_size=1, max_size=4),
)
def test_dynamic_for_each_row_of_its_own_length(
    geometry: Geometries, dim: int, base: float, factor: float, original: int, lengths: list[int]
) -> None:
    shape = geometry(head_dim=dim, original_length=original)
    scheme = Dynamic(base=base, factor=factor).resolve(shape, None)
    ours = scheme.angles(shape, torch.tensor(lengths)[:, None, None, None]).inv_freq
    assert ours.shape == (len(lengths), 1, 1, dim // 2)
    for row, length in zip(ours, lengths, strict=True):
        theirs = stock(scheme, shape, length).inv_freq
        torch.testing.assert_close(row.flatten(), theirs, rtol=2e-6 * max(1.0, dim / (dim - 2)), atol=0)
        if length <= original:
            assert torch.equal(row.flatten(), default_inv_freq(base, dim))


def test_dynamic_over_another_original_length_is_not_native(geometry: Geometries) -> None:
    shape = geometry(original_length=128)
    scheme = Dynamic(factor=2, original_length=64).resolve(shape, None)
    assert scheme.native_rope(shape) is None  # stock would start to stretch at 128 only
    assert scheme.native_rope(geometry(original_length=64)) is not None


@given(
    dim=WIDTHS,
    base=BASES,
    factor=FACTORS,
    original=LENGTHS,
    beta_fast=st.sampled_from([32.0, 16.0]),
    truncate=st.booleans(),
    attention_factor=st.none() | st.floats(0.5, 2.0),
)
def test_yarn_equals_stock_frequencies(
    geometry: Geometries,
    dim: int,
    base: float,
    factor: float,
    original: int,
    beta_fast: float,
    truncate: bool,
    attention_factor: float | None,
) -> None:
    shape = geometry(head_dim=dim, original_length=original)
    scheme = Yarn(
        base=base, factor=factor, beta_fast=beta_fast, truncate=truncate, attention_factor=attention_factor
    ).resolve(shape, None)
    assert_near(scheme.angles(shape), stock(scheme, shape), default_inv_freq(base, dim))


@pytest.mark.parametrize(("mscale", "mscale_all_dim"), [(None, None), (1.0, 1.0), (0.707, 1.0), (1.0, 0.5)])
def test_yarn_temperature_is_computed_as_transformers_does(
    geometry: Geometries, mscale: float | None, mscale_all_dim: float | None
) -> None:
    shape = geometry(original_length=4096)
    scheme = Yarn(factor=40, mscale=mscale, mscale_all_dim=mscale_all_dim).resolve(shape, None)
    native = scheme.native_rope(shape)
    config = llama_config(scheme, shape)
    del config.rope_parameters["attention_factor"]  # transformers has to compute its own
    config.rope_parameters |= {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
    _, theirs = ROPE_INIT_FUNCTIONS["yarn"](config)
    assert native["attention_factor"] == pytest.approx(theirs, rel=1e-12)


@given(dim=WIDTHS, base=BASES, factor=FACTORS, original=LENGTHS, low=st.floats(0.5, 4.0), band=st.floats(1.0, 8.0))
def test_llama3_equals_stock_frequencies(
    geometry: Geometries, dim: int, base: float, factor: float, original: int, low: float, band: float
) -> None:
    shape = geometry(head_dim=dim, original_length=original)
    scheme = Llama3(base=base, factor=factor, low_freq_factor=low, high_freq_factor=low + band).resolve(shape, None)
    # the band's ends are where a rounding of L/wavelength is stretched most: by (low + band)/band
    slack = 1 + (low + band) / band
    assert_near(scheme.angles(shape), stock(scheme, shape), slack * default_inv_freq(base, dim))


@given(dim=WIDTHS, base=BASES, factor=FACTORS, original=LENGTHS, data=st.data())
def test_longrope_short_and_long(
    geometry: Geometries, dim: int, base: float, factor: float, original: int, data: st.DataObject
) -> None:
    divisors = st.lists(st.floats(1.0, 1.25 * factor), min_size=dim // 2, max_size=dim // 2)
    short, long = data.draw(divisors), data.draw(divisors)
    shape = geometry(head_dim=dim, original_length=original)
    scheme = LongRope(base=base, factor=factor, short_factor=short, long_factor=long).resolve(shape, None)
    assert_near(scheme.angles(shape), stock(scheme, shape), default_inv_freq(base, dim))
    lengths = [1, original, original + 1, 4 * original]
    ours = scheme.angles(shape, torch.tensor(lengths)[:, None])
    for row, length in zip(ours.inv_freq, lengths, strict=True):
        theirs = stock(scheme, shape, length)
        assert_near(ours._replace(inv_freq=row), theirs, default_inv_freq(base, dim))
    config = llama_config(scheme, shape)
    del config.rope_parameters["attention_factor"]  # transformers has to compute its own
    assert ours.attention_factor == pytest.approx(ROPE_INIT_FUNCTIONS["longrope"](config)[1], rel=1e-12)


@pytest.mark.parametrize("name", ["linear", "dynamic", "yarn", "longrope", "llama3"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 32), (80, 20), (128, 96)])
def test_scaled_over_a_part_of_the_head(
    geometry: Geometries, example: Callable[..., RotaryScheme], name: str, head_dim: int, rotary_dim: int
) -> None:
    shape = geometry(head_dim=head_dim, rotary_dim=rotary_dim, layout="half", base=10000.0)
    scheme = example(name, shape).resolve(shape, None)
    assert scheme.rotary_dim(shape) == rotary_dim
    assert_near(scheme.angles(shape), stock(scheme, shape), default_inv_freq(10000.0, rotary_dim))


@pytest.mark.parametrize("name", ["rope", "linear", "ntk", "dynamic", "yarn", "longrope", "llama3"])
@pytest.mark.parametrize("length", [100, 128, 129, 500])
def test_the_mechanism_gives_the_cos_and_sin_of_the_stock_module(
    geometry: Geometries, example: Callable[..., RotaryScheme], name: str, length: int
) -> None:
    shape = geometry(original_length=128)
    scheme = example(name, shape).resolve(shape, None)
    positions = torch.arange(length)[None]
    cos, sin = LlamaRotaryEmbedding(llama_config(scheme, shape))(torch.zeros(1), positions)
    ours = scheme.mechanism(shape).prepare(positions, torch.full((1, 1, 1, 1), length))
    half = shape.head_dim // 2
    torch.testing.assert_close(ours.cos[:, 0], cos[..., :half], rtol=0, atol=2e-6 * length)
    torch.testing.assert_close(ours.sin[:, 0], sin[..., :half], rtol=0, atol=2e-6 * length)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 5e5},
        {"rope_type": "yarn", "factor": 4.0},
        {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 16.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.9,
        },
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.1, "truncate": False},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0, 1.5], "long_factor": [1.5, 3.0]},
    ],
    ids=str,
)
def test_rope_parameters_of_transformers_make_the_model_that_transformers_makes(parameters: dict[str, Any]) -> None:
    def llama(**values: Any) -> LlamaForCausalLM:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 16}
        config = LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=32, initializer_range=0.5, **values)
        return LlamaForCausalLM(config).eval()

    swapped = patch_model(llama(max_position_embeddings=32), parameters)
    original = parameters.get("original_max_position_embeddings", 32)
    longer = int(parameters.get("factor", 1.0) * original) if parameters.get("rope_type") != "dynamic" else 32
    given = {"rope_theta": 1e4, "original_max_position_embeddings": original, **parameters}
    given["rope_type"] = given.pop("type", None) or given["rope_type"]
    if given["rope_type"] in ("default", "linear", "dynamic"):
        del given["original_max_position_embeddings"]
    stock = llama(max_position_embeddings=longer, rope_parameters=given)
    ids = torch.randint(32, (1, 100))
    with torch.no_grad():
        assert torch.equal(swapped(ids).logits, stock(ids).logits)
