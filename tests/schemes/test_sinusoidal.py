"""Sinusoidal tables against transformers' own, the paper's formula in a loop, and the scale they promise."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.xlm.modeling_xlm import create_sinusoidal_embeddings

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes import Sinusoidal

Geometries = Callable[..., Geometry]


@pytest.mark.parametrize(("rows", "width"), [(1, 2), (37, 10), (513, 64)])
def test_halves_equal_marians_table(geometry: Geometries, rows: int, width: int) -> None:
    shape = geometry(hidden_size=width)
    ours = Sinusoidal(layout="halves", scale=1.0).table(torch.zeros(3, width), rows, shape)
    theirs = MarianSinusoidalPositionalEmbedding(rows, width).create_weight()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("rows", "width"), [(5, 2), (37, 10), (513, 64)])
def test_interleaved_equals_xlms_table(geometry: Geometries, rows: int, width: int) -> None:
    theirs = torch.empty(rows, width)
    create_sinusoidal_embeddings(rows, width, theirs)
    ours = Sinusoidal(scale=1.0).table(torch.zeros(3, width), rows, geometry(hidden_size=width))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


@settings(max_examples=30)
@given(
    rows=st.integers(1, 40),
    pairs=st.integers(1, 12),
    base=st.floats(2.0, 1e6),
    scale=st.floats(1e-3, 10.0),
    halves=st.booleans(),
)
def test_the_papers_formula_entry_by_entry(
    geometry: Geometries, rows: int, pairs: int, base: float, scale: float, halves: bool
) -> None:
    width = 2 * pairs
    scheme = Sinusoidal(base=base, scale=scale, layout="halves" if halves else "interleaved")
    table = scheme.table(torch.zeros(1, width), rows, geometry(hidden_size=width))
    assert table.shape == (rows, width)
    assert table.dtype == torch.float32
    for position in range(rows):
        for pair in range(pairs):
            angle = position / math.pow(base, 2 * pair / width)
            sine, cosine = (pair, pairs + pair) if halves else (2 * pair, 2 * pair + 1)
            assert table[position, sine].item() == pytest.approx(scale * math.sin(angle), abs=1e-7 * scale)
            assert table[position, cosine].item() == pytest.approx(scale * math.cos(angle), abs=1e-7 * scale)


@settings(max_examples=40)
@given(
    rows=st.integers(1, 300),
    new=st.integers(1, 600),
    size=st.sampled_from([1e-3, 0.02, 1.0, 30.0]),
    layout=st.sampled_from(["interleaved", "halves"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_match_gives_the_root_mean_square_of_the_old_table(
    geometry: Geometries, rows: int, new: int, size: float, layout: str, dtype: torch.dtype
) -> None:
    shape = geometry(hidden_size=48)
    old = (torch.randn(rows, 48) * size).to(dtype)
    scheme = Sinusoidal(layout=layout).fit(old, len(old), shape)
    assert isinstance(scheme.scale, float)
    assert scheme.fit(old * 2, len(old), shape) == scheme  # once fitted it stays
    table = scheme.table(old, new, shape)
    wanted = math.sqrt(sum(x * x for x in old.flatten().tolist()) / old.numel())
    assert table.double().square().mean().sqrt().item() == pytest.approx(wanted, rel=1e-6)


def test_a_zero_table_has_no_size_to_match(geometry: Geometries) -> None:
    assert Sinusoidal().fit(torch.zeros(4, 64), 4, geometry()).scale == 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_table_is_not_matched(geometry: Geometries, bad: float) -> None:
    old = torch.randn(4, 64)
    old[2, 3] = bad
    with pytest.raises(SchemeError, match="the table to match has NaN or infinite values; repair it, or give scale"):
        Sinusoidal().fit(old, 4, geometry())
    assert Sinusoidal(scale=1.0).fit(old, 4, geometry()).scale == 1.0


def test_match_must_be_fitted_before_the_table(geometry: Geometries) -> None:
    with pytest.raises(SchemeError, match=r"scale is still 'match': call fit first"):
        Sinusoidal().table(torch.zeros(4, 64), 4, geometry())


def test_an_odd_hidden_size_is_refused(geometry: Geometries) -> None:
    with pytest.raises(SchemeError, match=r"needs an even hidden size.*this model's is 63\. Scheme 'learned' works"):
        Sinusoidal().resolve(geometry(hidden_size=63), None)
