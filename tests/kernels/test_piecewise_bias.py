"""FIRE's bias in blocks against its network, pair by pair: values and gradients, in float64 and narrower."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posswap.geometry import Geometry
from hf_posswap.kernels import piecewise_bias
from hf_posswap.kernels.piecewise_bias import attend_piecewise, piecewise_blocks
from hf_posswap.kernels.segments import Segment, whole
from hf_posswap.schemes.learned_bias import Fire, FireMechanism

HEADS, DIM = 4, 8
UNITS: dict[str, tuple[list[float], list[float]]] = {
    "random": (torch.linspace(-1, 1, 12).tolist(), torch.linspace(0.9, -0.7, 12).tolist()),
    "knots tie": ([0.5, -1.0, 2.0, 1.0, -0.25], [-0.25, 0.5, -1.0, -0.5, 0.125]),
    "knots at zero": ([0.5, -0.5, 1.0, -1.0], [0.0, 0.0, 0.0, -0.0]),
    "zero slopes": ([0.0, 0.0, 0.0, 1.0], [0.5, -0.5, 0.0, -0.3]),
    "all dead": ([-1.0, 0.5, 0.0], [-0.5, -0.9, -1.0]),
    "all alive": ([1.0, -0.2, 0.0], [0.5, 0.9, 1.0]),
    "knots outside": ([1e-30, 1.0, -1e-30, 1e-3, 1.0], [-1.0, 7.0, 1.0, -1.0, -0.5]),
    "one unit": ([-2.0], [1.2]),
}  # fmt: skip
"""Weights and biases of the hidden layer."""


def fire(units: str, dtype: torch.dtype = torch.float64, threshold: float = 20.0) -> FireMechanism:
    weight, bias = (torch.tensor(numbers) for numbers in UNITS[units])
    shape = Geometry(HEADS * DIM, HEADS, HEADS, DIM, 1, 64, causal=True)
    mechanism = Fire(width=len(weight), threshold=threshold).resolve(shape, None).mechanism(shape)
    assert isinstance(mechanism, FireMechanism)
    mechanism.hidden_weight.data, mechanism.hidden_bias.data = weight, bias
    return mechanism.to(dtype)


def tensors(queries: int, keys: int, dtype: torch.dtype = torch.float64, groups: int = HEADS) -> list[Tensor]:
    source = torch.Generator().manual_seed(0)
    shapes = ((2, HEADS, queries, DIM), (2, groups, keys, DIM), (2, groups, keys, DIM))
    return [torch.randn(shape, generator=source, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def attend(mechanism: Any, inputs: list[Tensor], segments: tuple[Segment, ...]) -> Tensor:
    query, key, value = inputs
    blocks = piecewise_blocks(query, key, mechanism.piecewise_bias, segments)
    return attend_piecewise(query, key, value, blocks, scaling=0.3)


def formula(mechanism: Any, inputs: list[Tensor], segments: tuple[Segment, ...]) -> Tensor:
    """Return attention by the network's bias of all pairs, in the dtype of the network."""
    query, key, value = (x.to(mechanism.c.dtype) for x in inputs)
    share = HEADS // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    out = torch.zeros_like(query)
    for segment in segments:
        rows, queries, keys = (slice(*span) for span in segment[:3])
        into, at = (torch.arange(b - a) for a, b in (segment.queries, segment.keys))
        ahead = at - into[:, None]
        seen = torch.ones(ahead.shape, dtype=torch.bool)
        seen &= ahead <= (segment.last if segment.last is not None else len(at))
        seen &= ahead >= (segment.first if segment.first is not None else -len(into))
        bias = mechanism.bias(segment.start + segment.apart + into[None], segment.start + at[None])
        scores = query[rows, :, queries] @ key[rows, :, keys].mT * 0.3 + bias.masked_fill(~seen, -torch.inf)
        out[rows, :, queries] = scores.softmax(-1) @ value[rows, :, keys]
    return out


LAYOUTS = {
    "causal": (70, 70, whole(2, 70, 70, causal=True)),
    "several blocks": (230, 230, whole(2, 230, 230, causal=True)),
    "both sides": (70, 70, whole(2, 70, 70, causal=False)),
    "second chunk": (40, 90, (Segment((0, 2), (0, 40), (0, 90), last=50, apart=50),)),
    "window": (90, 90, (Segment((0, 2), (0, 90), (0, 90), first=-30, last=0),)),
    "packed": (90, 90, (Segment((0, 2), (0, 35), (0, 35), last=0), Segment((0, 2), (35, 90), (35, 90), last=0))),
    "left-padded": (
        70, 70, (Segment((0, 1), (0, 70), (0, 70), last=0), Segment((1, 2), (33, 70), (33, 70), last=0)),
    ),
    "keys far behind": (40, 40, (Segment((0, 2), (0, 40), (0, 40), apart=300),)),
    "keys far ahead": (40, 40, (Segment((0, 2), (0, 40), (0, 40), apart=-300, start=300),)),
    "one query": (1, 50, (Segment((0, 2), (0, 1), (0, 50), apart=49),)),
}  # fmt: skip


def assert_equal(mechanism: Any, inputs: list[Tensor], segments: tuple[Segment, ...]) -> None:
    """Assert equal values with and without gradients, and equal gradients, to the rounding of float64."""
    learned = list(mechanism.parameters())
    expected, found = formula(mechanism, inputs, segments), attend(mechanism, inputs, segments)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    with torch.no_grad():
        torch.testing.assert_close(attend(mechanism, inputs, segments), expected, rtol=1e-11, atol=1e-11)
    weights = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype).view_as(expected)
    results = [torch.autograd.grad((out * weights).sum(), [*inputs, *learned]) for out in (found, expected)]
    for result, reference in zip(*results, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("layout", ["causal", "both sides"])
def test_any_units_equal_the_network(units: str, layout: str) -> None:
    queries, keys, segments = LAYOUTS[layout]
    assert_equal(fire(units), tensors(queries, keys), segments)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_equals_the_network(layout: str) -> None:
    queries, keys, segments = LAYOUTS[layout]
    assert_equal(fire("random"), tensors(queries, keys), segments)


@pytest.mark.parametrize(("multiplier", "c"), [(0.4, 0.1), (-2.0, 0.1), (0.0, -0.7), (1.0, 1e-8), (100.0, 3.0)])
def test_learned_thresholds_and_scales(multiplier: float, c: float) -> None:
    mechanism = fire("random")
    mechanism.multiplier.data.fill_(multiplier)
    mechanism.c.data.fill_(c)
    queries, keys, segments = LAYOUTS["several blocks"]
    assert_equal(mechanism, tensors(queries, keys), segments)


@pytest.mark.parametrize("dense", [1, 10_000, 2**20])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_heads_apart_equal_all_heads(groups: int, dense: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piecewise_bias, "DENSE", dense)
    monkeypatch.setattr(piecewise_bias, "FEATURES", 50)
    queries, keys, segments = LAYOUTS["several blocks"]
    assert_equal(fire("random"), tensors(queries, keys, groups=groups), segments)


@pytest.mark.parametrize("kept", [0, 10_000, 2**21])
def test_layers_share_the_bias(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piecewise_bias, "KEPT", kept)
    mechanism, (queries, keys, segments) = fire("random"), LAYOUTS["several blocks"]
    query, key, value = tensors(queries, keys)
    with torch.no_grad():
        blocks = piecewise_blocks(query, key, mechanism.piecewise_bias, segments)
        for inputs in ([query, key, value], [query + 1, key, value.flip(2)]):
            found = attend_piecewise(*inputs, blocks, scaling=0.3)
            torch.testing.assert_close(found, formula(mechanism, inputs, segments), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrower_queries_and_parameters(dtype: torch.dtype) -> None:
    mechanism, (queries, keys, segments) = fire("random", dtype), LAYOUTS["several blocks"]
    inputs = tensors(queries, keys, dtype)
    found = attend(mechanism, inputs, segments)
    assert found.dtype == dtype
    exact = fire("random")
    exact.load_state_dict(mechanism.state_dict())
    expected = formula(exact, inputs, segments)
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    assert (found - expected).abs().max() < rounding
    learned = [mechanism.c, mechanism.hidden_weight, mechanism.hidden_bias, mechanism.out_weight, mechanism.multiplier]
    references = [exact.c, exact.hidden_weight, exact.hidden_bias, exact.out_weight, exact.multiplier]
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    grads = torch.autograd.grad((found * weights).sum(), learned)
    for grad, reference in zip(grads, torch.autograd.grad((expected * weights).sum(), references), strict=True):
        assert grad.dtype == dtype
        assert (grad - reference).abs().max() < 6 * rounding * max(1.0, float(reference.abs().max()))


def test_frozen_parameters_leave_the_inputs_their_gradients() -> None:
    mechanism, (queries, keys, segments) = fire("random").requires_grad_(False), LAYOUTS["several blocks"]
    inputs = tensors(queries, keys)
    results = [
        torch.autograd.grad(way(mechanism, inputs, segments).square().sum(), inputs) for way in (attend, formula)
    ]
    for result, reference in zip(*results, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-9, atol=1e-11)


def test_a_second_derivative_is_refused() -> None:
    queries, keys, segments = LAYOUTS["causal"]
    mechanism, inputs = fire("random"), tensors(queries, keys)
    (grad,) = torch.autograd.grad(attend(mechanism, inputs, segments).square().sum(), mechanism.c, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_numbers_that_are_not_finite_are_not_hidden() -> None:
    queries, keys, segments = LAYOUTS["causal"]
    for name in ("c", "hidden_weight", "hidden_bias", "out_weight", "out_bias"):
        mechanism = fire("random")
        getattr(mechanism, name).data.view(-1)[0] = torch.nan
        with torch.no_grad():
            assert attend(mechanism, tensors(queries, keys), segments).isnan().any(), name


def test_a_second_backward_through_the_same_graph_gives_the_same_gradients() -> None:
    queries, keys, segments = LAYOUTS["several blocks"]
    mechanism, inputs = fire("random"), tensors(queries, keys)
    wanted = [*inputs, *mechanism.parameters()]
    loss = attend(mechanism, inputs, segments).square().sum()
    first, second = (torch.autograd.grad(loss, wanted, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
