"""FIRE against a loop of the paper's formula in float64; where it is relative and where it is not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_posswap.geometry import Geometry
from hf_posswap.schemes import learned_bias
from hf_posswap.schemes.learned_bias import Fire, FireMechanism

Geometries = Callable[..., Geometry]


def made(geometry: Geometries, scheme: Fire, heads: int = 4, **changes: int) -> FireMechanism:
    shape = geometry(num_heads=heads, **changes)
    mechanism = scheme.resolve(shape, None).mechanism(shape)
    assert isinstance(mechanism, FireMechanism)
    return mechanism


def trained(mechanism: FireMechanism) -> FireMechanism:
    """Move every parameter, c and M even to the other sign, as training may."""
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.5)
    return mechanism


def formula(mechanism: FireMechanism, threshold: float, head: int, i: int, j: int) -> float:
    """Equation 5 of Li et al. with the logarithm of its appendix, one query and key at a time."""
    c, m = mechanism.c.item(), mechanism.multiplier.item()
    share = math.log(abs(c * (i - j)) + 1) / (math.log(abs(c * max(i, abs(m * threshold))) + 1) + 1e-6)
    out = mechanism.out_bias[head].item()
    for w in range(len(mechanism.hidden_bias)):
        hidden = max(0.0, mechanism.hidden_weight[w].item() * share + mechanism.hidden_bias[w].item())
        out += mechanism.out_weight[head, w].item() * hidden
    return out


@settings(max_examples=25, deadline=None)
@given(
    heads=st.integers(1, 5),
    width=st.integers(1, 33),
    threshold=st.floats(0.5, 600),
    rows=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), min_size=1, max_size=2),
    queries=st.integers(1, 3),
    keys=st.integers(1, 4),
)
def test_bias_is_the_loop(
    geometry: Geometries,
    heads: int,
    width: int,
    threshold: float,
    rows: list[tuple[int, int]],
    queries: int,
    keys: int,
) -> None:
    mechanism = trained(made(geometry, Fire(width=width, threshold=threshold), heads))
    query_positions = torch.stack([torch.arange(queries) + q for q, _ in rows])
    key_positions = torch.stack([torch.arange(keys) + k for _, k in rows])
    bias = mechanism.bias(query_positions, key_positions)
    assert bias.dtype == torch.float32
    assert bias.shape == (len(rows), heads, queries, keys)
    for b, (q, k) in enumerate(rows):
        for h in range(heads):
            for i in range(queries):
                for j in range(keys):
                    expected = formula(mechanism, threshold, h, q + i, k + j)
                    # float32 sums of up to 33 products of numbers near 1
                    assert bias[b, h, i, j].item() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_it_begins_as_the_paper_does(geometry: Geometries) -> None:
    mechanism = made(geometry, Fire(width=1000), heads=64, original_length=4096)
    assert (mechanism.c.item(), mechanism.multiplier.item()) == (pytest.approx(0.1), 1.0)
    assert mechanism.threshold == 512
    for values, bound in (
        (mechanism.hidden_weight, 1.0),
        (mechanism.hidden_bias, 1.0),
        (mechanism.out_weight, 1000**-0.5),
        (mechanism.out_bias, 1000**-0.5),
    ):  # torch's linear layers: uniform within 1 / sqrt(inputs)
        assert bound * 0.9 < values.abs().max() <= bound
        assert values.std().item() == pytest.approx(bound / 3**0.5, rel=0.15)


@pytest.mark.parametrize(("original", "expected"), [(32, 8), (1024, 256), (2048, 512), (131072, 512)])
def test_the_threshold_fits_the_model(geometry: Geometries, original: int, expected: float) -> None:
    assert Fire().resolve(geometry(original_length=original), 8 * original).threshold == expected
    assert Fire(threshold=77).resolve(geometry(original_length=original), None).threshold == 77


def test_relative_up_to_the_threshold_and_not_beyond(geometry: Geometries) -> None:
    mechanism = made(geometry, Fire(threshold=100))
    near, below, beyond = (torch.arange(20)[None] + start for start in (0, 80, 81))
    assert torch.equal(mechanism.bias(below, below), mechanism.bias(near, near))
    here, there = mechanism.bias(beyond + 200, beyond + 200), mechanism.bias(near, near)
    assert (here - there).abs().max() > 1e-3
    assert not Fire(threshold=100).traits.relative
    assert Fire(threshold=100).traits.prefix_consistent


def test_every_distance_to_the_past_stays_within_what_was_trained(geometry: Geometries) -> None:
    """The point of the paper: at any length, the network sees shares of [0, 1] only, so its bias stays in range."""
    mechanism = made(geometry, Fire())
    short = torch.arange(128)[None]
    first = mechanism.bias(short, short).tril()
    far = torch.tensor([[50_000]])
    keys = torch.arange(0, 50_001, 7)[None]
    bias = mechanism.bias(far, keys)
    for h in range(4):
        head = first[0, h][torch.ones(128, 128, dtype=torch.bool).tril()]
        assert bias[0, h].min() >= head.min() - 1e-4
        assert bias[0, h].max() <= head.max() + 1e-4


def test_gradients_reach_every_parameter_from_both_sides_of_the_threshold(geometry: Geometries) -> None:
    mechanism = made(geometry, Fire(threshold=10))
    positions = torch.arange(6)[None]
    mechanism.bias(positions, positions).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in mechanism.parameters())
    mechanism.zero_grad()
    mechanism.bias(positions + 50, positions + 50).square().sum().backward()
    assert not mechanism.multiplier.grad.any()  # i alone counts there
    assert mechanism.c.grad.any()


def test_repr_names_heads_width_and_threshold(geometry: Geometries) -> None:
    assert repr(made(geometry, Fire())) == "FireMechanism(heads=4, width=32, threshold=32)"


@pytest.mark.parametrize("at_a_time", [1, 5, 64])
@pytest.mark.parametrize("batch", [1, 2])
def test_parts_give_what_the_whole_gives(
    geometry: Geometries, batch: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mechanism = trained(made(geometry, Fire()))
    positions = torch.arange(9).repeat(batch, 1) + 100 * torch.arange(batch)[:, None]
    whole = mechanism.bias(positions, positions)
    assert whole.requires_grad
    monkeypatch.setattr(learned_bias, "IN_CACHE", at_a_time)
    with torch.no_grad():
        torch.testing.assert_close(mechanism.bias(positions, positions), whole.detach(), rtol=1e-6, atol=1e-6)
