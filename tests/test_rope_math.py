"""The arithmetic of rotation against transformers' own, against complex numbers, and in bf16 at far positions.

Positions in groups: as a floor division by Python gives them, also in code that inductor makes.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_posswap import rope_math as rotary
from hf_posswap.geometry import Layout
from hf_posswap.rope_math import CosSin, Frequencies, cos_sin, default_inv_freq, groups_of, rotate, rotate_read


def modeling(name: str) -> Any:
    """Return transformers' modeling module of one architecture."""
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def full_width(table: Tensor, layout: Layout) -> Tensor:
    """Return [B, Q, R] as transformers' modules hand it over, from our [B, 1, Q, R/2]."""
    half = table[:, 0]
    return torch.cat((half, half), dim=-1) if layout == "half" else half.repeat_interleave(2, dim=-1)


@pytest.mark.parametrize(
    ("architecture", "handed_over", "layout", "rotary_dim"),
    [
        ("llama", "half", "half", 16),
        ("gpt_neox", "half", "half", 16),
        ("gpt_neox", "half", "half", 4),
        ("cohere", "interleaved", "interleaved", 16),
        ("glm", "half", "interleaved", 16),  # GLM repeats the first half itself
        ("glm", "half", "interleaved", 8),
    ],
)
@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_rotate_equals_transformers_bit_by_bit(
    architecture: str, handed_over: Layout, layout: Layout, rotary_dim: int, factor: float
) -> None:
    q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16)
    positions = torch.stack((torch.arange(9), torch.arange(9) + 1000))
    table = cos_sin(positions, Frequencies(default_inv_freq(10000.0, rotary_dim), factor))
    cos, sin = full_width(table.cos, handed_over), full_width(table.sin, handed_over)
    theirs = modeling(architecture).apply_rotary_pos_emb(q, k, cos, sin)
    assert torch.equal(rotate(q, table, layout), theirs[0])
    assert torch.equal(rotate(k, table, layout), theirs[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interleaved_in_low_precision_equals_cohere(dtype: torch.dtype) -> None:
    q = torch.randn(1, 2, 5, 8, dtype=dtype)  # Cohere, too, rotates in float32 and rounds once
    table = cos_sin(torch.arange(5)[None], Frequencies(default_inv_freq(10000.0, 8)))
    cos, sin = full_width(table.cos, "interleaved"), full_width(table.sin, "interleaved")
    assert torch.equal(rotate(q, table, "interleaved"), modeling("cohere").apply_rotary_pos_emb(q, q, cos, sin)[0])


@given(
    pairs=st.integers(1, 40),
    passed=st.integers(0, 9),
    heads=st.integers(1, 7),
    queries=st.integers(1, 9),
    offset=st.integers(0, 4096),
    layout=st.sampled_from(["half", "interleaved"]),
)
def test_rotation_is_multiplication_by_a_complex_number(
    pairs: int, passed: int, heads: int, queries: int, offset: int, layout: Layout
) -> None:
    x = torch.randn(2, heads, queries, 2 * pairs + passed, dtype=torch.float64)
    inv_freq = default_inv_freq(10000.0, 2 * pairs)
    positions = torch.arange(queries) + offset
    out = rotate(x, cos_sin(positions[None], Frequencies(inv_freq)), layout)
    turn = torch.polar(torch.ones(queries, pairs).double(), positions[:, None].double() * inv_freq.double())
    part = x[..., : 2 * pairs]
    pairwise = part.unflatten(-1, (2, pairs)).transpose(-1, -2) if layout == "half" else part.unflatten(-1, (pairs, 2))
    turned = torch.view_as_real(torch.complex(pairwise[..., 0], pairwise[..., 1]) * turn)  # [2, H, Q, pairs, 2]
    expected = turned.transpose(-1, -2).flatten(-2) if layout == "half" else turned.flatten(-2)
    torch.testing.assert_close(out[..., : 2 * pairs], expected, rtol=0, atol=4e-6)
    assert torch.equal(out[..., 2 * pairs :], x[..., 2 * pairs :])
    assert out.dtype == x.dtype


def rotate_exactly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the half-split rotation of `x` in float64."""
    first, second = x.double().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@pytest.mark.parametrize("position", [0, 1, 4095, 100_000])
def test_bf16_result_is_the_rounded_rotation_and_nothing_worse(position: int) -> None:
    x = torch.randn(4, 8, 1, 128).bfloat16()
    inv_freq = default_inv_freq(10000.0, 128)
    table = cos_sin(torch.tensor([[position]]), Frequencies(inv_freq))
    assert table.cos.dtype == table.sin.dtype == torch.float32
    ours = rotate(x, table, "half")
    assert ours.dtype == torch.bfloat16
    by_table = rotate_exactly(x, table.cos.double(), table.sin.double())
    half_ulp = by_table.abs() * 2.0**-8  # bf16 keeps 8 bits: a rounding moves a number by 2^-9 to 2^-8 of itself
    slack = x.double().norm() * 2.0**-22  # the products and the sum in float32
    assert ((ours.double() - by_table).abs() <= half_ulp + slack).all()


def test_bf16_at_position_100000_is_nearer_the_truth_than_a_bf16_table() -> None:
    position = 100_000
    x = torch.randn(4, 8, 1, 128).bfloat16()
    inv_freq = default_inv_freq(10000.0, 128, torch.float64)
    angle = torch.tensor([float(position) * 10000.0 ** (-2 * pair / 128) for pair in range(64)], dtype=torch.float64)
    truth = rotate_exactly(x, angle.cos(), angle.sin())
    table = cos_sin(torch.tensor([[position]]), Frequencies.of(inv_freq))
    ours = (rotate(x, table, "half").double() - truth).abs()
    pair_norm = torch.stack(x.double().chunk(2, dim=-1)).norm(dim=0).repeat(1, 1, 1, 2)
    assert (ours <= truth.abs() * 2.0**-8 + pair_norm * 2.0**-20).all()
    cos, sin = full_width(table.cos, "half").bfloat16(), full_width(table.sin, "half").bfloat16()
    theirs = (modeling("llama").apply_rotary_pos_emb(x, x, cos, sin)[0].double() - truth).abs()
    assert ours.mean() < theirs.mean()


def test_default_inv_freq_does_not_follow_the_default_dtype() -> None:
    expected = default_inv_freq(10000.0, 64)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):  # nor the default device
            assert torch.equal(default_inv_freq(10000.0, 64), expected)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("layout", "width"), [("half", 8), ("half", 4), ("interleaved", 8)])
@pytest.mark.parametrize("learns", [False, True])
def test_keys_that_are_read_are_rotated_alike(layout: Layout, width: int, dtype: torch.dtype, learns: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 3, 8, generator=generator).to(dtype).transpose(1, 2)  # [B, G, K, D] as a cache gives it
    x.requires_grad_(learns)
    table = cos_sin(torch.arange(9)[None] * 7, Frequencies(default_inv_freq(100.0, width)))
    table = CosSin(table.cos.double(), table.sin.double()) if dtype == torch.float64 else table
    before = x.detach().clone()
    expected, found = rotate(x, table, layout), rotate_read(x, table, layout)
    assert found.dtype == dtype
    assert torch.equal(x.detach(), before)
    assert (found - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()
    if learns:
        assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (expected, found)))


def test_gradients_flow_through_the_rotation() -> None:
    x = torch.randn(1, 2, 3, 6, dtype=torch.float64, requires_grad=True)
    table = cos_sin(torch.arange(3)[None], Frequencies(default_inv_freq(100.0, 4)))
    for layout in ("half", "interleaved"):
        assert torch.autograd.gradcheck(lambda x, layout=layout: rotate(x, table, layout), (x,))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [4, 16])
@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_a_large_tensor_is_rotated_in_one_buffer_to_the_same_bits(
    layout: Layout, rotary_dim: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotary, "LEAST_TOKENS", tokens)  # 16: all at once
    monkeypatch.setattr(rotary, "IN_CACHE", 1)
    wide = torch.randn(2, 9, 5, 3, 16).unbind(3)[1].transpose(1, 2).requires_grad_()  # a part of a fused projection
    positions = torch.stack((torch.arange(9), torch.arange(9) + 3)) * 100
    table = cos_sin(positions, Frequencies(default_inv_freq(10000.0, rotary_dim), 1.25))
    weight, found = torch.randn(2, 5, 9, 16), []
    for large in (2**30, 0):
        monkeypatch.setattr(rotary, "LARGE", large)
        turned = rotate(wide, table, layout)
        found.append((turned, *torch.autograd.grad((turned * weight).sum(), wide)))
    for part, whole in zip(*found, strict=True):
        assert torch.equal(part, whole)
    double = [x.double() for x in (wide.detach()[:1, :2, :5], *(part[:1, ..., :5, :] for part in table))]

    def in_double(x: Tensor) -> Tensor:
        return rotate(x, CosSin(double[1], double[2]), layout)

    assert torch.autograd.gradgradcheck(in_double, double[0].requires_grad_())
    assert torch.equal(torch.func.vmap(lambda x: rotate(x, table, layout))(wide[None])[0], turned)


@pytest.mark.slow
def test_a_compiled_rotation_is_the_same_but_for_the_last_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "LARGE", 0)
    rotary.compile_rotation()
    try:
        x = torch.randn(2, 40, 3, 16).transpose(1, 2).requires_grad_()
        table = cos_sin(torch.arange(40)[None], Frequencies(default_inv_freq(10000.0, 8)))
        found, expected = rotate(x, table, "half"), rotary._joined(x, *table, "half")
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        weight = torch.randn_like(x)
        ours, theirs = (torch.autograd.grad((out * weight).sum(), x)[0] for out in (found, expected))
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
        assert rotary._compiled is not None
    finally:
        rotary.compile_rotation(False)


@pytest.mark.parametrize("size", [2, 8, 9, 11, 64, 300])
@pytest.mark.parametrize("first", [-40, 0, 2**24 + 1])
def test_groups_are_those_of_a_division_by_python(size: int, first: int) -> None:
    positions = torch.arange(first, first + 256)
    assert groups_of(positions, size).tolist() == [at // size for at in range(first, first + 256)]


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 9, 11, 64, 300])
def test_compiled_groups_are_those_of_a_division_by_python(size: int) -> None:
    """Inductor cuts the loop of a plain division into groups, and does not write those that are not whole."""
    torch._dynamo.reset()  # else the size would be a symbol
    run = torch.compile(lambda: groups_of(torch.arange(256), size), fullgraph=True)
    run()
    for left in [torch.full((256,), -1) for _ in range(64)]:
        del left  # what is not written holds this
    assert run().tolist() == [at // size for at in range(256)]
