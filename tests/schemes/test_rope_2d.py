"""Axial rotary embedding against complex numbers, against Qwen2-VL's own code, and what it promises."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision

from hf_posswap.errors import SchemeError
from hf_posswap.schemes import Rope2D
from hf_posswap.schemes.common.table import ROW_STRIDE, places_of
from tests.schemes.small import geometry, image_geometry

LENGTH = torch.zeros(1, 1, 1, 1)
LAYOUTS = st.sampled_from(["half", "interleaved"])


def turned(scheme: Rope2D, x: Tensor, places: Tensor) -> Tensor:
    """Return queries [1, H, N, D] at `places` as the mechanism turns them; keys it turns alike."""
    mechanism = scheme.resolve(image_geometry(head_dim=x.shape[-1]), None).mechanism(
        image_geometry(head_dim=x.shape[-1])
    )
    prepared = mechanism.prepare(places, LENGTH)
    assert torch.equal(mechanism.rotate_query(x, prepared), mechanism.rotate_key(x, prepared))
    return mechanism.rotate_query(x, prepared)


def by_complex_numbers(x: Tensor, rows: list[int], columns: list[int], base: float, layout: str, width: int) -> Tensor:
    """Return x [1, H, N, D] with pair i < R/4 turned by its row, the others by its column, one number after another."""
    out = x.clone().double()
    pairs = width // 2
    for token, (row, column) in enumerate(zip(rows, columns, strict=True)):
        for pair in range(pairs):
            step = pair % (pairs // 2)
            angle = (row if pair < pairs // 2 else column) * base ** (-2 * step / pairs)
            first, second = (pair, pair + pairs) if layout == "half" else (2 * pair, 2 * pair + 1)
            number = torch.complex(x[..., token, first].double(), x[..., token, second].double())
            number = number * torch.polar(torch.tensor(1.0).double(), torch.tensor(angle).double())
            out[..., token, first], out[..., token, second] = number.real, number.imag
    return out.to(x.dtype)


@settings(max_examples=25, deadline=None)
@given(
    layout=LAYOUTS,
    base=st.floats(2, 1e5),
    grid=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    prefix=st.integers(0, 2),
    partial=st.sampled_from([0.25, 0.5, 1.0]),
)
def test_complex_numbers_say_the_same(
    layout: str, base: float, grid: tuple[int, int], prefix: int, partial: float
) -> None:
    places = places_of(grid, prefix, torch.device("cpu"))
    x = torch.randn(1, 2, places.shape[1], 16)
    rows = [0] * prefix + [r for r in range(grid[0]) for _ in range(grid[1])]
    columns = [0] * prefix + [c for _ in range(grid[0]) for c in range(grid[1])]
    expected = by_complex_numbers(x, rows, columns, base, layout, round(16 * partial))
    found = turned(Rope2D(base=base, layout=layout, partial=partial), x, places)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert torch.equal(found[:, :, :prefix], x[:, :, :prefix])  # tokens without a place stand still


def test_qwen2_vl_turns_its_patches_so() -> None:
    rows, columns = torch.arange(3).repeat_interleave(5), torch.arange(5).repeat(3)
    theta = 10000.0 ** (-torch.arange(0, 8, 2) / 8)  # a quarter of 16 dimensions a head
    angles = torch.cat((rows[:, None] * theta, columns[:, None] * theta), dim=-1).repeat(1, 2)  # [N, D]
    query = torch.randn(15, 2, 16)
    theirs, _ = apply_rotary_pos_emb_vision(query, query, angles.cos(), angles.sin())
    ours = turned(Rope2D(base=10000.0), query.transpose(0, 1)[None], places_of((3, 5), 0, torch.device("cpu")))
    torch.testing.assert_close(ours[0].transpose(0, 1), theirs, rtol=0, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    layout=LAYOUTS,
    down=st.integers(0, 40),
    right=st.integers(0, 40),
    apart=st.tuples(st.integers(0, 20), st.integers(0, 20)),
)
def test_a_score_depends_on_rows_and_columns_between(
    layout: str, down: int, right: int, apart: tuple[int, int]
) -> None:
    query, key = torch.randn(2, 1, 1, 1, 16)
    scheme = Rope2D(layout=layout)  # type: ignore[arg-type]

    def score(row: int, column: int) -> Tensor:
        at, other = (
            torch.tensor([[r * ROW_STRIDE + c]]) for r, c in ((row, column), (row + apart[0], column + apart[1]))
        )
        return (turned(scheme, query, at) * turned(scheme, key, other)).sum()

    torch.testing.assert_close(score(down, right), score(0, 0), rtol=0, atol=1e-4)


def test_rows_and_columns_are_told_apart() -> None:
    query = torch.ones(1, 1, 1, 16)
    by_row = turned(Rope2D(), query, torch.tensor([[3 * ROW_STRIDE]]))
    by_column = turned(Rope2D(), query, torch.tensor([[3]]))
    assert (by_row - by_column).abs().max() > 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": 1.0}, "base must be a finite number > 1"),
        ({"partial": 0.0}, "partial must be a finite number > 0"),
        ({"layout": "hlaf"}, "layout must be one of 'half', 'interleaved', got 'hlaf'"),
    ],
)
def test_impossible_parameters_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        Rope2D(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("head_dim", "partial"), [(18, 1.0), (16, 0.1), (6, 1.0)])
def test_widths_that_do_not_fall_into_rows_and_columns(head_dim: int, partial: float) -> None:
    with pytest.raises(SchemeError, match=f"needs a multiple of 4 dimensions a head, but head_dim {head_dim} with"):
        Rope2D(partial=partial).resolve(image_geometry(head_dim=head_dim), None)


def test_the_shape_of_text_has_no_grid() -> None:
    with pytest.raises(AssertionError, match="sees no images"):
        geometry().grid()
