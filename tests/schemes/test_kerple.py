"""KERPLE against loops of the paper's formulas in float64; and parameters that stay in range whatever training does."""

from __future__ import annotations

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
from hf_posswap.schemes.learned_bias import Kerple, KerpleMechanism

Geometries = Callable[..., Geometry]
VARIANTS = ["log", "power"]


def formula(variant: str, raw_r1: float, raw_r2: float, distance: int) -> float:
    """Equations 6 and 7 of Chi et al., on parameters that are kept positive."""
    r1 = math.log1p(math.exp(raw_r1))
    if variant == "log":
        return -r1 * math.log(1 + math.log1p(math.exp(raw_r2)) * distance)
    return -r1 * distance ** (2 / (1 + math.exp(-raw_r2)))


def made(geometry: Geometries, variant: str, heads: int, seed: int = 0) -> KerpleMechanism:
    mechanism = Kerple(variant=variant, seed=seed).mechanism(geometry(num_heads=heads))  # type: ignore[arg-type]
    assert isinstance(mechanism, KerpleMechanism)
    return mechanism


@pytest.mark.parametrize("variant", VARIANTS)
def test_bias_is_the_double_loop(geometry: Geometries, variant: str) -> None:
    @settings(max_examples=25)
    @given(
        heads=st.integers(1, 7),
        rows=st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 9000)), min_size=1, max_size=3),
        queries=st.integers(1, 4),
        keys=st.integers(1, 5),
        spread=st.floats(0, 2),
    )
    def check(heads: int, rows: list[tuple[int, int]], queries: int, keys: int, spread: float) -> None:
        mechanism = made(geometry, variant, heads)
        with torch.no_grad():  # as if trained
            for parameter in mechanism.parameters():
                parameter.add_(torch.randn(heads), alpha=spread)
        query_positions = torch.stack([torch.arange(queries) + q for q, _ in rows])
        key_positions = torch.stack([torch.arange(keys) + k for _, k in rows])
        bias = mechanism.bias(query_positions, key_positions)
        assert bias.dtype == torch.float32
        assert bias.shape == (len(rows), heads, queries, keys)
        for b, (q, k) in enumerate(rows):
            for h in range(heads):
                raw = mechanism.raw_r1[h].item(), mechanism.raw_r2[h].item()
                for i in range(queries):
                    for j in range(keys):
                        expected = formula(variant, *raw, abs(q + i - k - j))
                        assert bias[b, h, i, j].item() == pytest.approx(expected, rel=3e-5, abs=1e-6)

    check()


@pytest.mark.parametrize(("variant", "first", "second"), [("log", 2.0, 1.0), ("power", 1.0, 2.0)])
def test_it_begins_as_the_authors_code_does(geometry: Geometries, variant: str, first: float, second: float) -> None:
    """Uniform up to 2 and 1 ("log") or 1 and 2 ("power"), above 0.01."""
    mechanism = made(geometry, variant, heads=4000)
    for value, high in ((mechanism.r1(), first), (mechanism.r2(), second)):
        assert value.min() >= 0.01 * (1 - 1e-4)
        assert value.max() <= high * (1 + 1e-4)
        quantiles = value.quantile(torch.linspace(0, 1, 11))
        torch.testing.assert_close(quantiles, torch.linspace(0.01, high, 11), rtol=0, atol=0.04 * high)


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_begins_as_asked(geometry: Geometries, variant: Any) -> None:
    given = Kerple(variant=variant, r1=(0.25, 40.0, 1e-4), r2=(0.01, 1.5, 1.0))
    mechanism = given.resolve(geometry(num_heads=3), None).mechanism(geometry(num_heads=3))
    assert isinstance(mechanism, KerpleMechanism)
    torch.testing.assert_close(mechanism.r1().detach(), torch.tensor(given.r1), rtol=1e-3, atol=0)
    torch.testing.assert_close(mechanism.r2().detach(), torch.tensor(given.r2), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"r1": (0.5, 0.5)}, r"^kerple: give r1 and r2 together, got r1=\(0.5, 0.5\) and r2=None.$"),
        ({"r1": (0.5, 0.0), "r2": (1.0, 1.0)}, r"^kerple: r1\[1\] must be .* 0"),
        ({"variant": "power", "r1": (0.5,), "r2": (2.0,)}, r"^kerple: r2 must be below 2 where it is a power, got \(2"),
        ({"r1": (0.5,), "r2": (1.0,)}, "^kerple: r1 has 1 numbers, and this model has 2 heads; give one each.$"),
    ],
)
def test_a_start_that_cannot_be_is_refused(geometry: Geometries, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(SchemeError, match=problem):
        Kerple(**fields).resolve(geometry(num_heads=2), None)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_fit_is_as_near_as_any_pair_of_numbers(geometry: Geometries, variant: Any) -> None:
    """Weighted squares of what is left, each head's constant free, against a search over both numbers."""
    random = np.random.default_rng(0)
    distances, heads = np.arange(40), 4
    target = -np.outer([0.3, 1.0, 0.05, -0.2], distances) + random.normal(scale=0.3, size=(heads, 40))
    weights = random.dirichlet(np.ones(40), size=heads)
    shape = geometry(num_heads=heads)
    fitted = Kerple(variant=variant).fitted(
        torch.from_numpy(target), torch.from_numpy(weights), torch.from_numpy(distances), shape
    )

    def left(head: int, r1: float, r2: float) -> float:
        bias = -r1 * np.log1p(r2 * distances) if variant == "log" else -r1 * distances**r2
        away = target[head] - bias
        return float(weights[head] @ (away - weights[head] @ away) ** 2)

    assert fitted.r1 is not None
    assert fitted.r2 is not None
    rates = np.geomspace(1e-4, 900, 160) if variant == "log" else np.linspace(0.01, 1.99, 160)
    for head in range(heads):
        nearest = min(left(head, r1, r2) for r2 in rates for r1 in np.geomspace(1e-4, 4e4, 160))
        assert left(head, fitted.r1[head], fitted.r2[head]) <= nearest * (1 + 1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("toward", [-1, 1])
def test_training_cannot_leave_the_range(geometry: Geometries, variant: str, toward: int) -> None:
    mechanism, positions = made(geometry, variant, heads=3), torch.arange(12)[None]
    optimizer = torch.optim.SGD(mechanism.parameters(), lr=0.5)
    for _ in range(60):
        optimizer.zero_grad()
        (toward * mechanism.bias(positions, positions).clamp(min=-50)).mean().backward()
        assert all(torch.isfinite(p.grad).all() for p in mechanism.parameters())  # 0^r2 on the diagonal, too
        optimizer.step()
    begun = made(geometry, variant, heads=3)
    assert ((mechanism.r1() - begun.r1()) * toward > 0.05).all()  # it did train
    for value, high in ((mechanism.r1(), math.inf), (mechanism.r2(), math.inf if variant == "log" else 2.0)):
        assert (value > 0).all()
        assert (value <= high).all()
    bias = mechanism.bias(positions, positions)
    assert (bias <= 0).all()
    assert not bias.diagonal(dim1=-2, dim2=-1).any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_the_formula(geometry: Geometries, variant: str) -> None:
    mechanism, positions = made(geometry, variant, heads=2), torch.arange(9)[None]
    mechanism.bias(positions, positions).sum().backward()

    def total(h: int, raw_r1: Tensor, raw_r2: Tensor) -> float:
        return sum(formula(variant, float(raw_r1), float(raw_r2), abs(i - j)) for i in range(9) for j in range(9))

    step = 1e-5
    for h in range(2):
        raw = mechanism.raw_r1[h].detach().double(), mechanism.raw_r2[h].detach().double()
        by_r1 = (total(h, raw[0] + step, raw[1]) - total(h, raw[0] - step, raw[1])) / (2 * step)
        by_r2 = (total(h, raw[0], raw[1] + step) - total(h, raw[0], raw[1] - step)) / (2 * step)
        assert float(mechanism.raw_r1.grad[h]) == pytest.approx(by_r1, rel=1e-3)
        assert float(mechanism.raw_r2.grad[h]) == pytest.approx(by_r2, rel=1e-3)


def test_both_sides_weigh_the_same_for_an_encoder(geometry: Geometries) -> None:
    positions = torch.tensor([[3, 4, 9]])
    bias = Kerple().mechanism(geometry(num_heads=6, causal=False)).bias(positions, positions)
    assert torch.equal(bias, bias.mT)
    assert (bias < 0).sum() == 6 * 6  # all but the diagonal


def test_repr_names_variant_and_heads(geometry: Geometries) -> None:
    assert repr(made(geometry, "power", 3)) == "KerpleMechanism(variant='power', heads=3)"
