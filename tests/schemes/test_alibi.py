"""ALiBi against a double loop, the published slopes, the recursion of the paper's code, and BLOOM's table.

With learned slopes it is compared with the formula of their parameters, and with ALiBi of the same numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes import make_scheme
from hf_posswap.schemes.alibi import Alibi, AlibiMechanism, slopes
from hf_posswap.schemes.learned_bias import Kerple
from hf_posswap.schemes.mechanism import Mechanism

# Press et al. 2021, the 12-head model
PUBLISHED = [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625, 0.70711, 0.35355, 0.17678, 0.08839]


def recursive_slopes(heads: int) -> list[float]:
    """The paper's rule by recursion: a geometric sequence whose first term and ratio are 2^(-2^(3 - log2 n))."""
    exponent = math.log2(heads)
    if exponent.is_integer():
        start = 2 ** -(2 ** (3 - exponent))
        return [start**h for h in range(1, heads + 1)]
    nearest = 2 ** math.floor(exponent)
    return recursive_slopes(nearest) + recursive_slopes(2 * nearest)[::2][: heads - nearest]


def test_slopes_equal_the_published_list() -> None:
    assert slopes(12) == pytest.approx(PUBLISHED, abs=5e-6)
    assert slopes(8) == PUBLISHED[:8]


@pytest.mark.parametrize("heads", range(1, 65))
def test_slopes_of_every_head_count(heads: int) -> None:
    assert slopes(heads) == pytest.approx(recursive_slopes(heads), rel=1e-12)
    assert len(slopes(heads)) == heads


@settings(max_examples=50)
@given(
    heads=st.integers(1, 17),
    rows=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)), min_size=1, max_size=3),
    queries=st.integers(1, 5),
    keys=st.integers(1, 7),
)
def test_bias_is_the_double_loop(
    geometry: Callable[..., Geometry], heads: int, rows: list[tuple[int, int]], queries: int, keys: int
) -> None:
    query_positions = torch.stack([torch.arange(queries) + q for q, _ in rows])
    key_positions = torch.stack([torch.arange(keys) + k for _, k in rows])
    bias = Alibi().mechanism(geometry(num_heads=heads)).bias(query_positions, key_positions)
    assert bias.dtype == torch.float32
    assert bias.shape == (len(rows), heads, queries, keys)
    expected = torch.empty(bias.shape, dtype=torch.float64)
    for b, (q, k) in enumerate(rows):
        for h, slope in enumerate(recursive_slopes(heads)):
            for i in range(queries):
                for j in range(keys):
                    expected[b, h, i, j] = -slope * abs(q + i - k - j)
    torch.testing.assert_close(bias.double(), expected, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("heads", [1, 3, 8, 12])
def test_under_a_causal_mask_it_is_blooms(geometry: Callable[..., Geometry], heads: int) -> None:
    length = 11
    positions = torch.arange(length)[None]
    causal = torch.full((length, length), -torch.inf).triu(1)
    ours = Alibi().mechanism(geometry(num_heads=heads)).bias(positions, positions)[0]
    theirs = build_alibi_tensor(torch.ones(1, length), heads, torch.float32)  # [H, 1, K]: +m j, equal after softmax
    torch.testing.assert_close((ours + causal).softmax(-1), (theirs + causal).softmax(-1), rtol=1e-5, atol=1e-7)


def test_both_sides_weigh_the_same_for_an_encoder(geometry: Callable[..., Geometry]) -> None:
    positions = torch.tensor([[3, 4, 9]])
    bias = Alibi().mechanism(geometry(num_heads=6, causal=False)).bias(positions, positions)
    assert torch.equal(bias, bias.mT)
    assert (bias < 0).sum() == 6 * 6  # all but the diagonal


def test_moving_the_model_to_bf16_leaves_the_slopes_alone(geometry: Callable[..., Geometry]) -> None:
    mechanism = Alibi().mechanism(geometry(num_heads=12)).to(torch.bfloat16)
    assert mechanism.slopes.dtype == torch.float32
    assert mechanism.state_dict() == {}
    assert mechanism.bias(torch.tensor([[5]]), torch.tensor([[2]])).dtype == torch.float32


@pytest.mark.parametrize("interpolation", [None, 2.0])
def test_own_slopes_are_a_penalty_for_each_head(geometry: Callable[..., Geometry], interpolation: float | None) -> None:
    own = (0.3, 0.0, 2.5)
    scheme = Alibi(slopes=own, interpolation=interpolation).resolve(geometry(num_heads=3), None)
    bias = scheme.mechanism(geometry(num_heads=3)).bias(torch.tensor([[5, 9]]), torch.tensor([[2, 9, 11]]))
    for head, slope in enumerate(own):
        for row, i in enumerate((5, 9)):
            for column, j in enumerate((2, 9, 11)):
                expected = -slope / (interpolation or 1.0) * abs(i - j)
                assert float(bias[0, head, row, column]) == pytest.approx(expected, rel=1e-6)


def test_own_slopes_fit_the_heads_and_survive_json(geometry: Callable[..., Geometry]) -> None:
    scheme = Alibi(slopes=[0.5, 0.125])
    assert make_scheme(json.loads(json.dumps(scheme.to_dict()))) == scheme
    assert str(scheme) == "alibi(slopes=(0.5, 0.125))"
    with pytest.raises(SchemeError, match=r"alibi: slopes has 2 numbers, and this model has 4 heads; give one each\."):
        scheme.resolve(geometry(num_heads=4), None)


def test_the_papers_slopes_given_are_no_slopes_of_ones_own(geometry: Callable[..., Geometry]) -> None:
    assert Alibi(slopes=tuple(slopes(6))).resolve(geometry(num_heads=6), None) == Alibi()


@pytest.mark.parametrize("factor", [1, 2, 3.5])
def test_interpolation_makes_stretched_distances_cost_what_they_did(
    geometry: Callable[..., Geometry], factor: float
) -> None:
    positions = torch.arange(8)[None] * 2
    plain = Alibi().mechanism(geometry(num_heads=6)).bias(positions, positions)
    interpolated = Alibi(interpolation=factor)
    stretched = interpolated.mechanism(geometry(num_heads=6)).bias(positions * factor, positions * factor)
    torch.testing.assert_close(stretched, plain, rtol=1e-6, atol=0)
    assert interpolated.reach(geometry(original_length=100)) == 100 * factor
    assert Alibi().reach(geometry()) is None


def learned(geometry: Callable[..., Geometry], *raw: float, interpolation: float | None = None) -> Mechanism:
    """Return the mechanism of learned slopes whose parameters are `raw`, as if trained."""
    mechanism = Alibi(learned=True, interpolation=interpolation).mechanism(geometry(num_heads=len(raw)))
    assert isinstance(mechanism, AlibiMechanism)
    with torch.no_grad():
        mechanism.raw_slopes.copy_(torch.tensor(raw))
    return mechanism


@pytest.mark.parametrize("interpolation", [None, 2.0])
def test_learned_slopes_are_a_softplus_for_each_head(
    geometry: Callable[..., Geometry], interpolation: float | None
) -> None:
    raw = (-9.0, -1.25, 0.5, 30.0)
    mechanism = learned(geometry, *raw, interpolation=interpolation)
    bias = mechanism.bias(torch.tensor([[5, 9]]), torch.tensor([[2, 9, 11]])).detach()
    assert bias.dtype == torch.float32
    for head, x in enumerate(raw):
        for row, i in enumerate((5, 9)):
            for column, j in enumerate((2, 9, 11)):
                expected = -math.log1p(math.exp(x)) / (interpolation or 1.0) * abs(i - j)
                assert float(bias[0, head, row, column]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("interpolation", [None, 4.0])
def test_learned_slopes_begin_as_those_that_are_not(
    geometry: Callable[..., Geometry], interpolation: float | None
) -> None:
    """But for slopes near 0, which training could not raise."""
    for start, heads in ((None, 12), ((0.3, 40.0, 1e-3, 2e-5), 4)):
        mechanisms = [
            Alibi(slopes=start, interpolation=interpolation, learned=is_learned).mechanism(geometry(num_heads=heads))
            for is_learned in (True, False)
        ]
        assert [mechanism.learns_slopes for mechanism in mechanisms] == [True, False]
        torch.testing.assert_close(mechanisms[0].slopes, mechanisms[1].slopes, rtol=1e-6, atol=0)
        assert mechanisms[0].state_dict().keys() == {"raw_slopes"}
    least = Alibi(slopes=(0.0, 1e-7), learned=True).mechanism(geometry(num_heads=2)).slopes
    torch.testing.assert_close(least, torch.full((2,), 1e-5), rtol=1e-5, atol=0)


def test_gradients_of_learned_slopes_are_those_of_the_formula(geometry: Callable[..., Geometry]) -> None:
    """The derivative of softplus is the logistic function."""
    mechanism, positions = learned(geometry, -3.0, 0.4, interpolation=2.0), torch.arange(9)[None]
    weights = torch.randn(2, 9, 9, generator=torch.Generator().manual_seed(0))
    (mechanism.bias(positions, positions)[0] * weights).sum().backward()
    for h, x in enumerate((-3.0, 0.4)):
        pulled = sum(float(weights[h, i, j]) * -abs(i - j) / 2.0 for i in range(9) for j in range(9))
        grad = mechanism.get_parameter("raw_slopes").grad
        assert grad is not None
        assert float(grad[h]) == pytest.approx(pulled / (1 + math.exp(-x)), rel=1e-5)


def test_no_training_makes_a_learned_slope_negative(geometry: Callable[..., Geometry]) -> None:
    mechanism, positions = learned(geometry, -3.0, 0.4), torch.arange(9)[None]
    optimizer = torch.optim.SGD(mechanism.parameters(), lr=0.5)
    for _ in range(60):
        optimizer.zero_grad()
        (-mechanism.bias(positions, positions)).mean().backward()
        optimizer.step()
    assert mechanism.slopes is not None
    assert (mechanism.slopes < 0.5 * torch.tensor([math.log1p(math.exp(x)) for x in (-3.0, 0.4)])).all()
    assert (mechanism.slopes >= 0).all()


def test_learned_is_a_field_like_any_other(geometry: Callable[..., Geometry]) -> None:
    scheme = make_scheme("alibi:learned=true")
    assert scheme == Alibi(learned=True) == make_scheme(json.loads(json.dumps(scheme.to_dict())))
    assert make_scheme({"name": "alibi", "interpolation": None, "slopes": None}) == Alibi(), "as records once were"
    assert str(Alibi(learned=True, slopes=(0.5, 0.25))) == "alibi(slopes=(0.5, 0.25), learned=True)"
    assert str(Alibi()) == "alibi"
    assert Alibi(slopes=tuple(slopes(6)), learned=True).resolve(geometry(num_heads=6), None) == scheme
    assert repr(learned(geometry, 0.1, 0.2)) == "AlibiMechanism(heads=2, learned)"


def test_slopes_of_a_sum_follow_what_is_learned(geometry: Callable[..., Geometry]) -> None:
    shape = geometry(num_heads=2)
    fixed, moved = Alibi(slopes=(0.5, 0.25)), Alibi(slopes=(0.125, 1.0), learned=True)
    for one, other, total in ((fixed, fixed, (1.0, 0.5)), (fixed, moved, (0.625, 1.25)), (moved, fixed, (0.625, 1.25))):
        mechanism = (one + other).mechanism(shape)
        assert mechanism.learns_slopes == (moved in (one, other))
        assert mechanism.slopes is not None
        torch.testing.assert_close(mechanism.slopes.detach(), torch.tensor(total), rtol=1e-6, atol=0)
        assert mechanism.slopes.requires_grad == mechanism.learns_slopes
        with torch.no_grad():
            for parameter in mechanism.parameters():
                parameter.fill_(-30.0)
        at = torch.arange(5)[None]
        straight = -mechanism.slopes[:, None, None] * (at[0, :, None] - at).abs()
        torch.testing.assert_close(mechanism.bias(at, at)[0], straight, rtol=1e-6, atol=1e-7)
    mixed = (moved + Kerple()).mechanism(shape)
    assert (mixed.slopes, mixed.learns_slopes) == (None, False), "a bias of another form"
