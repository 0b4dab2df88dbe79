"""Tables of patches: MAE's sines and cosines, the interpolation of a learned one, and image sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_posswap.errors import SchemeError
from hf_posswap.schemes import GridTable, Learned2D, Sinusoidal2D, make_scheme, schemes_for
from tests.schemes.small import image_geometry

OLD = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
TABLES = [name for name, cls in schemes_for("images").items() if issubclass(cls, GridTable)]


def mae(width: int, rows: int, columns: int) -> np.ndarray:
    """Return the table [R C, E] as MAE's own code makes it, without a class token's row of zeros."""

    def one_axis(dimension: int, places: np.ndarray) -> np.ndarray:
        omega = 1.0 / 10000 ** (np.arange(dimension // 2, dtype=np.float64) / (dimension / 2.0))
        out = np.einsum("m,d->md", places.reshape(-1), omega)
        return np.concatenate([np.sin(out), np.cos(out)], axis=1)

    grid = np.stack(np.meshgrid(np.arange(columns, dtype=np.float64), np.arange(rows, dtype=np.float64)), axis=0)
    return np.concatenate([one_axis(width // 2, grid[0]), one_axis(width // 2, grid[1])], axis=1)


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), width=st.sampled_from([4, 8, 64]))
def test_mae_makes_the_same_table(rows: int, columns: int, width: int) -> None:
    shape = image_geometry(hidden_size=width)
    scheme = Sinusoidal2D(scale=1.0).resolve(shape, None)
    found = scheme.table(OLD[:, :width], (4, 4), (rows, columns), shape)
    expected = torch.from_numpy(mae(width, rows, columns)).float()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_the_scale_that_matches() -> None:
    shape = image_geometry()
    scheme = Sinusoidal2D().resolve(shape, None)
    with pytest.raises(SchemeError, match="sinusoidal_2d: scale is still 'match': call fit"):
        scheme.table(OLD, (4, 4), (4, 4), shape)
    table = scheme.fit(3 * OLD, shape).table(OLD, (4, 4), (7, 3), shape)
    assert math.isclose(float(table.square().mean().sqrt()), float((3 * OLD).square().mean().sqrt()), rel_tol=1e-5)
    assert scheme.fit(0 * OLD, shape).scale == 1.0
    with pytest.raises(SchemeError, match="sinusoidal_2d: the table to match has NaN"):
        scheme.fit(OLD / 0, shape)


def test_sines_and_cosines_of_rows_and_columns_need_four_columns() -> None:
    with pytest.raises(SchemeError, match=r"hidden size that 4 divides.* this model's is 62. Scheme 'learned_2d'"):
        Sinusoidal2D().resolve(image_geometry(hidden_size=62), None)
    with pytest.raises(SchemeError, match="sinusoidal_2d: scale must be 'match' or a number > 0, got 'mtach'"):
        Sinusoidal2D(scale="mtach")  # type: ignore[arg-type]


def cubic(x: float) -> float:
    """Return Keys' kernel with a = -0.75, which torch's bicubic has."""
    a, x = -0.75, abs(x)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


@settings(max_examples=8, deadline=None)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9))
def test_interpolation_by_the_cubic_kernel_place_by_place(rows: int, columns: int) -> None:
    shape, old = image_geometry(hidden_size=4), OLD[:, :4]
    found = Learned2D().resolve(shape, None).table(old, (4, 4), (rows, columns), shape).view(rows, columns, 4)
    for r in range(rows):
        for c in range(columns):
            y, x = (r + 0.5) * 4 / rows - 0.5, (c + 0.5) * 4 / columns - 0.5
            expected = torch.zeros(4)
            for i in range(math.floor(y) - 1, math.floor(y) + 3):
                for j in range(math.floor(x) - 1, math.floor(x) + 3):
                    held = old[min(max(i, 0), 3) * 4 + min(max(j, 0), 3)]
                    expected += cubic(y - i) * cubic(x - j) * held
            torch.testing.assert_close(found[r, c], expected, rtol=0, atol=1e-5)


def test_a_table_of_the_same_grid_is_kept() -> None:
    shape = image_geometry()
    assert torch.equal(Learned2D().resolve(shape, None).table(OLD, (4, 4), (4, 4), shape), OLD)


@pytest.mark.parametrize("name", TABLES)
def test_image_sizes_are_taken_as_one_number_or_two(name: str) -> None:
    shape = image_geometry()
    assert make_scheme(name).resolve(shape, None).image_size == (32, 32)  # type: ignore[attr-defined]
    given_one = make_scheme(name, image_size=48).resolve(shape, None)
    assert given_one.image_size == (48, 48)  # type: ignore[attr-defined]
    assert given_one.reach(shape) == 37
    assert make_scheme(given_one.to_dict()) == given_one
    wide = make_scheme(name, image_size=[24, 40]).resolve(shape, None)
    assert (wide.grid(shape), wide.reach(shape)) == ((3, 5), 16)  # type: ignore[attr-defined]
    for wrong in (0, -8, 8.0, "48", True, (48,), (48, 0), (48, 48, 48), 2**16):
        with pytest.raises(SchemeError, match=f"{name}: image_size must be a number of pixels, or height and width"):
            make_scheme(name, image_size=wrong)
    with pytest.raises(SchemeError, match=r"36 x 44 pixels is not a whole number of patches of 8 x 8; .* 32 x 48\."):
        make_scheme(name, image_size=(36, 44)).resolve(shape, None)
    odd = image_geometry(image_size=(35, 35))  # SigLIP's 384 pixels are 27 patches of 14, and a rest
    assert make_scheme(name).resolve(odd, None).grid(odd) == (4, 4)  # type: ignore[attr-defined]
