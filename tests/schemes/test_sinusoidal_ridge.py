"""Sinusoidal tables fitted to a learned one, against least squares on the augmented system, and brute force."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes import Sinusoidal, make_scheme

Geometries = Callable[..., Geometry]


def waves(rows: int, width: int, base: float = 10000.0, *, halves: bool = False) -> Any:
    """Return the paper's sines and cosines, [rows, width], entry by entry."""
    table = np.zeros((rows, width))
    for position in range(rows):
        for pair in range(width // 2):
            angle = position / base ** (2 * pair / width)
            sine, cosine = (pair, pair + width // 2) if halves else (2 * pair, 2 * pair + 1)
            table[position, sine], table[position, cosine] = math.sin(angle), math.cos(angle)
    return table


def learned(rows: int, width: int, seed: int = 0) -> Tensor:
    """Return a table as training leaves one: smooth over positions, with noise and a mean."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(rows, width, generator=generator).cumsum(0) / rows**0.5
    return 0.1 * steps + 0.02 * torch.randn(rows, width, generator=generator) + torch.randn(width, generator=generator)


def least_squares(old: Tensor, rows: int, ridge: float, features: Any) -> Any:
    """Return S W + m, W by least squares on S over sqrt(ridge) I, and T - m over zeros."""
    table = old.double().numpy()
    count, width = table.shape
    mean = table.mean(axis=0)
    left = np.vstack((features[:count], math.sqrt(ridge) * np.eye(width)))
    right = np.vstack((table - mean, np.zeros((width, width))))
    solution, *_ = np.linalg.lstsq(left, right, rcond=None)
    return features[:rows] @ solution + mean


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(2, 40),
    rows=st.integers(1, 80),
    pairs=st.integers(1, 16),
    ridge=st.sampled_from([0.5, 1.0, 30.0]),
    base=st.sampled_from([500.0, 10000.0]),
    halves=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_rows_are_those_of_least_squares_on_the_augmented_system(
    geometry: Geometries, count: int, rows: int, pairs: int, ridge: float, base: float, halves: bool, seed: int
) -> None:
    width = 2 * pairs
    old, shape = learned(count, width, seed), geometry(hidden_size=width, original_length=count)
    scheme = Sinusoidal(base=base, layout="halves" if halves else "interleaved", ridge=ridge)
    wanted = least_squares(old, max(rows, count), ridge, waves(max(rows, count), width, base, halves=halves))
    growth = growth_of(wanted, old) if rows > count else None
    if growth is not None and growth > 3:
        with pytest.raises(SchemeError, match="times as long as those inside"):
            scheme.fit(old, rows, shape)
        return
    fitted = scheme.fit(old, rows, shape)
    table = fitted.table(old, rows, shape)
    assert table.dtype == torch.float32
    np.testing.assert_allclose(table.numpy(), wanted[:rows], rtol=0, atol=1e-6)
    assert fitted.scale == pytest.approx(math.sqrt((wanted[:rows] ** 2).mean()), rel=1e-6)
    left, spread = wanted[:count] - old.double().numpy(), (old - old.double().mean(0)).numpy()
    assert fitted.residual == pytest.approx(math.sqrt((left**2).sum() / (spread**2).sum()), rel=1e-5)
    assert fitted.growth == (None if growth is None else pytest.approx(growth, rel=1e-5))


def growth_of(table: Any, old: Tensor) -> float:
    """Return the length of the longest row beyond `old` by that of the longest inside, less the mean of `old`."""
    lengths = [math.sqrt(sum(x * x for x in row)) for row in (table - old.double().mean(0).numpy()).tolist()]
    return max(lengths[len(old) :], default=0.0) / max(lengths[: len(old)])


def test_a_linear_map_of_the_sinusoids_is_found_again_inside_and_beyond(geometry: Geometries) -> None:
    features, shape = waves(200, 32), geometry(hidden_size=32, original_length=100)
    whole = torch.from_numpy(features @ np.random.default_rng(0).normal(size=(32, 32)))
    old = whole[:100] + 5.0 - whole[:100].mean(0)
    scheme = Sinusoidal(ridge=1e-6).fit(old, 100, shape)
    assert scheme.residual is not None
    assert scheme.residual < 1e-3
    assert Sinusoidal(ridge=1e9).fit(old, 200, shape).residual == pytest.approx(1.0, abs=1e-4)  # all but the mean


def test_a_table_of_another_size_is_fitted_alike(geometry: Geometries) -> None:
    old, shape = learned(64, 32), geometry(hidden_size=32, original_length=64)
    small, large = (Sinusoidal(ridge=1.0).fit(table, 128, shape) for table in (old, 1000 * old))
    torch.testing.assert_close(1000 * small.table(old, 128, shape), large.table(1000 * old, 128, shape))
    assert small.residual == pytest.approx(large.residual)


def test_rows_that_explode_are_refused_by_name_before_any_is_written(geometry: Geometries) -> None:
    old, shape = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)), geometry(original_length=64)
    assert growth_of(least_squares(old, 256, 1e-4, waves(256, 64)), old) > 3  # else it would not be refused
    with pytest.raises(SchemeError, match=r"ridge=0.0001 rows beyond the old table are up to .* Give a larger ridge"):
        Sinusoidal(ridge=1e-4).fit(old, 256, shape)
    assert Sinusoidal(ridge=1e-4).fit(old, 64, shape).growth is None  # nothing beyond


def test_a_fit_stays_what_it_is_and_comes_back_from_its_record(geometry: Geometries) -> None:
    old, shape = learned(64, 32), geometry(hidden_size=32, original_length=64)
    fitted = Sinusoidal(ridge=1.0).fit(old, 128, shape)
    again = make_scheme(json.loads(json.dumps(fitted.to_dict())))
    assert again == fitted
    assert fitted.fit(3 * old, 128, shape) == fitted
    assert torch.equal(again.table(old, 128, shape), fitted.table(old, 128, shape))  # type: ignore[attr-defined]


def test_what_it_notes_is_what_the_fit_found(geometry: Geometries) -> None:
    old, shape = learned(64, 32), geometry(hidden_size=32, original_length=64)
    assert Sinusoidal().notes() == ()
    assert "will be ridge-fitted" in Sinusoidal(ridge=1.0).notes()[0]
    fitted = Sinusoidal(ridge=1.0).fit(old, 128, shape)
    assert f"residual of {fitted.residual:.0%} of its spread" in fitted.notes()[0]
    assert f"{fitted.growth:.2f} times as long as the longest inside" in fitted.notes()[0]
    assert "beyond" not in Sinusoidal(ridge=1.0).fit(old, 64, shape).notes()[0]


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("cast", [torch.float32, torch.bfloat16, torch.float16])
def test_its_own_rows_are_what_is_expected_to_rounding(geometry: Geometries, layout: str, cast: torch.dtype) -> None:
    old, shape = learned(64, 32), geometry(hidden_size=32, original_length=64)
    fitted = Sinusoidal(ridge=1.0, layout=layout).fit(old, 128, shape)
    held = fitted.table(old, 128, shape).to(cast).float()
    worst = (fitted.expected(held, shape) - held).abs().max()
    assert worst <= {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[cast] * held.abs().max()


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "in another order": lambda rows: torch.cat((rows[::2], rows[1::2])),
    "half as large": lambda rows: rows / 2,
    "zero": torch.zeros_like,
    "one row of NaN": lambda rows: torch.where(torch.arange(len(rows))[:, None] == 5, math.nan, rows),
    "one entry off": lambda rows: rows + (torch.arange(rows.numel()).view_as(rows) == 999) * rows.abs().max(),
    "shifted by a position": lambda rows: rows.roll(1, 0),
    "drawn": lambda rows: torch.randn(rows.shape, generator=torch.Generator().manual_seed(0)) * rows.std(),
}


@pytest.mark.parametrize("change", OTHERS)
def test_other_rows_are_not_what_is_expected(geometry: Geometries, change: str) -> None:
    old, shape = learned(64, 32), geometry(hidden_size=32, original_length=64)
    fitted = Sinusoidal(ridge=1.0).fit(old, 128, shape)
    held = OTHERS[change](fitted.table(old, 128, shape))
    worst = (fitted.expected(held, shape) - held).abs().max()
    assert not worst <= 2**-7 * held.abs().max()


def test_another_base_expects_other_rows(geometry: Geometries) -> None:
    old, shape = learned(64, 32), geometry(hidden_size=32, original_length=64)
    held = Sinusoidal(ridge=1.0).fit(old, 128, shape).table(old, 128, shape)
    other = Sinusoidal(ridge=1.0, base=500.0).fit(old, 128, shape)
    assert (other.expected(held, shape) - held).abs().max() > 2**-7 * held.abs().max()


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf], ids=str)
def test_a_fitted_scheme_gives_sound_rows_where_the_weights_are_not_loaded_yet(
    geometry: Geometries, value: float
) -> None:
    old, shape = learned(64, 32), geometry(hidden_size=32, original_length=64)
    fitted = Sinusoidal(ridge=1.0).fit(old, 128, shape)
    for other in (torch.full_like(old, value), torch.randn(64, 32)):
        rows = fitted.table(other, 128, shape)
        assert rows.double().square().mean().sqrt().item() == pytest.approx(fitted.scale, rel=1e-6)
        torch.testing.assert_close(fitted.expected(rows, shape), rows, rtol=0, atol=1e-5 * rows.abs().max().item())


@pytest.mark.parametrize(("value", "said"), [(0.0, "is zero everywhere"), (math.nan, "has NaN or infinite values")])
def test_a_table_without_a_fit_is_refused(geometry: Geometries, value: float, said: str) -> None:
    with pytest.raises(SchemeError, match=f"the table to fit {said}; repair it, or leave ridge out"):
        Sinusoidal(ridge=1.0).fit(torch.full((8, 64), value), 8, geometry())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ridge": 1.0, "scale": 0.5}, r"finds scale and residual, got scale=0.5 and residual=None; leave both out"),
        ({"ridge": 1.0, "residual": 0.5}, r"finds scale and residual, got scale='match' and residual=0.5"),
        ({"residual": 0.5}, r"residual and growth are found by a fit, and ridge is not given"),
        ({"growth": 0.5}, r"residual and growth are found by a fit, and ridge is not given"),
    ],
)
def test_what_a_fit_finds_is_not_given(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SchemeError, match=said):
        Sinusoidal(**options)


def test_it_must_be_fitted_before_the_table(geometry: Geometries) -> None:
    with pytest.raises(SchemeError, match="scale is still 'match': call fit first"):
        Sinusoidal(ridge=1.0).table(torch.ones(4, 64), 4, geometry())
