"""Schemes made of schemes: per layer, every n-th layer, a table beside a rotation, a blend of old and new."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.rope_math import stock_cos_sin
from hf_posswap.schemes import (
    Alibi,
    Blend,
    Dynamic,
    Learned,
    Linear,
    LongRope,
    NoPE,
    PerLayer,
    RNoPE,
    Rope,
    Sinusoidal,
    SSMax,
    Sum,
    Together,
    XPos,
    Yarn,
    make_scheme,
    native,
)
from hf_posswap.schemes.rope import own_rope

Geometries = Callable[..., Geometry]


def test_layers_have_the_schemes_that_they_are_given(geometry: Geometries) -> None:
    scheme = PerLayer(layers={1: "nope", "3": {"name": "alibi"}, 0: Rope(base=5.0)}, default=Yarn(factor=2))  # type: ignore[arg-type]
    shape = geometry(num_layers=5)
    resolved = scheme.resolve(shape, None)
    assert [resolved.of_layer(layer).name for layer in range(5)] == ["rope", "nope", "yarn", "alibi", "yarn"]
    mechanism = resolved.mechanism(shape)
    kinds = [mechanism.for_layer(layer) for layer in range(5)]
    assert [(kind.rotates, kind.biases) for kind in kinds] == [
        (True, False),
        (False, False),
        (True, False),
        (False, True),
        (True, False),
    ]
    assert kinds[2] is kinds[4], "layers with the same scheme share what it computes"
    assert make_scheme({0: "rope", 1: NoPE()}) == PerLayer(layers={0: Rope(), 1: NoPE()})  # type: ignore[arg-type]


@given(layers=st.integers(2, 40), every=st.integers(2, 9))
def test_every_nth_layer_has_no_positions(geometry: Geometries, layers: int, every: int) -> None:
    scheme, shape = RNoPE(every=every), geometry(num_layers=layers)
    if every > layers:
        with pytest.raises(SchemeError, match=f"with every={every} none of the model's {layers} layers"):
            scheme.resolve(shape, None)
        return
    resolved = scheme.resolve(shape, None)
    free = [n for n in range(layers) if resolved.of_layer(n).kind == "none"]
    assert free == list(range(every - 1, layers, every))
    assert RNoPE(layers=free).resolve(shape, None).of_layer(free[-1]).kind == "none"  # type: ignore[arg-type]


def test_rotary_layers_keep_the_models_own_angles(geometry: Geometries) -> None:
    own = tuple(0.5**i for i in range(8))
    scaled = geometry(base=10000.0, rotary_dim=16, layout="half", frequencies=own, num_layers=4)
    rotary = RNoPE().resolve(scaled, None).rotary
    assert isinstance(rotary, Rope)
    assert rotary.frequencies == own
    for strange in ({"frequencies": None}, {"frequencies": own, "attention_factor": 1.2}):
        with pytest.raises(SchemeError, match=r"rnope: the model's own rotation is not a plain one .* rotary="):
            own_rope("rnope", geometry(base=10000.0, rotary_dim=16, layout="half", **strange))


@pytest.mark.parametrize("pin", [None, 64, 2000])
def test_the_logit_scale_is_one_plus_c_ln_s(geometry: Geometries, pin: int | None) -> None:
    shape = geometry(original_length=100)
    mechanism = NoPE(logit_scale=0.3, pin=pin).resolve(shape, None).mechanism(shape)
    found = mechanism.scale(torch.tensor([[0, 99, 100, 399, 10**6]]))[0].tolist()
    lengths = [1, 100, 101, 400, 10**6 + 1] if pin is None else [pin] * 5
    assert found == pytest.approx([1 + 0.3 * math.log(max(1.0, length / 100)) for length in lengths], rel=1e-6)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: PerLayer(layers={-1: "rope"}), "per_layer: a layer must be a whole number from 0 to 65536, got -1."),
        (lambda: PerLayer(layers={"x": "rope"}), "per_layer: a layer must be a whole number from 0 to 65536, got 'x'."),
        (lambda: PerLayer(layers={True: "rope"}), "a layer must be a whole number from 0 to 65536, got True."),
        (lambda: PerLayer(layers=["rope"]), "layers must map layers to schemes, as in {0: 'rope'}, got ['rope']."),
        (lambda: PerLayer(layers={0: "learned"}), "layers[0] must be a scheme that acts inside attention (rope, "),
        (lambda: PerLayer(default=RNoPE()), "default must be a scheme that acts inside attention"),
        (lambda: RNoPE(rotary="alibi"), "rnope: rotary must be a rotary scheme, got alibi."),
        (lambda: RNoPE(layers=[]), "rnope: layers must be a list of whole numbers >= 0, got []."),
        (lambda: RNoPE(layers="12"), "rnope: layers must be a list of whole numbers >= 0, got '12'."),
        (lambda: RNoPE(layers=[1.5]), "rnope: a layer must be a whole number from 0 to 65536, got 1.5."),
        (lambda: Together(table="rope"), "together: table must be a table scheme (learned, sinusoidal), got rope."),
        (lambda: Learned() + NoPE(), "together: a table with nope is only the table: use learned."),
        (lambda: Rope() + Yarn(factor=2), "each rotate queries and keys"),
        (lambda: Rope() + NoPE(), "sum: nope does nothing, so it adds nothing: leave it out."),
        (lambda: Rope() + RNoPE(), "sum: rnope combines schemes by layer or by weight; make it of sums"),
        (lambda: native() + native(), "sum: native stands for all that the model has, so give it once."),
        (lambda: native() + Learned(), "together: learned would replace a table that native keeps"),
        (lambda: Learned() + Sinusoidal(), "together: inside must be a scheme that acts inside attention"),
        (lambda: Sum(terms="rope"), "sum: terms must be a list of schemes, got 'rope'."),
        (lambda: Sum(terms=("rope",)), "sum: terms must be at least two schemes, got rope."),  # type: ignore[arg-type]
        (lambda: Rope().per_layer({0: "ssmax"}), "layers[0] must be a scheme that acts inside attention"),
        (lambda: SSMax(s=0.0), "ssmax: s must be"),
        (lambda: Blend(new=Blend()), "blend: new must be one scheme, not several in one, got blend("),
    ],
)
def test_impossible_compositions_are_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(SchemeError) as caught:
        make()
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "changes", "max_length", "says"),
    [
        (PerLayer(layers={2: "rope"}, default=Rope()), {}, None, "has layers 0 to 1; there is no layer 2."),  # type: ignore[arg-type]
        (PerLayer(layers={1: "rope"}), {}, None, "has layers 0 to 1; layer 0 has no scheme, nor a default."),  # type: ignore[arg-type]
        (RNoPE(layers=[7]), {}, None, "rnope: the model has layers 0 to 1; there is no layer 7."),  # type: ignore[arg-type]
        (Blend(new=Rope()), {}, 129, "blend: the old table, which is still in use, ends at 128 positions"),
        (Blend(new=Rope(), old="rotary"), {}, None, "blend: old='rotary', but the model has a table."),
        (Blend(new=Rope()), {"base": 9.0, "rotary_dim": 16}, None, "angles follow the length of its input"),
        (Blend(new=XPos()), {}, None, "is not a fixed set of angles, so there is nothing to blend them into."),
        (Blend(new=Dynamic(factor=2)), {}, None, "is not a fixed set of angles"),
        (Blend(new=LongRope(long_factor=[2.0] * 8, factor=2, pin=500, original_positions=3)), {}, None, "is no fixed"),  # type: ignore[arg-type]
        (
            Blend(new=Rope(partial=0.5)),
            {"base": 9.0, "rotary_dim": 16, "layout": "half", "frequencies": (1.0,) * 8},
            None,
            "must turn the pairs that the old one turns (16 dimensions, half)",
        ),
        (
            Blend(new=Rope(layout="interleaved")),
            {"base": 9.0, "rotary_dim": 16, "layout": "half", "frequencies": (1.0,) * 8},
            None,
            "must turn the pairs that the old one turns",
        ),
    ],
    ids=str,
)
def test_models_that_cannot_have_them(
    geometry: Geometries, scheme: Any, changes: dict[str, Any], max_length: int | None, says: str
) -> None:
    with pytest.raises(SchemeError) as caught:
        scheme.resolve(geometry(**changes), max_length)
    assert says in str(caught.value)


@given(weight=st.floats(0, 1), factor=st.floats(1, 30))
def test_angles_of_a_blend_lie_between(geometry: Geometries, weight: float, factor: float) -> None:
    own = tuple(0.7**i for i in range(8))
    shape = geometry(base=10000.0, rotary_dim=16, layout="half", frequencies=own, attention_factor=1.1)
    new = Yarn(factor=factor).resolve(shape, None).angles(shape)
    mechanism = Blend(new=Yarn(factor=factor), weight=weight).resolve(shape, None).mechanism(shape)
    angles = mechanism.angles()
    expected = (1 - weight) * torch.tensor(own, dtype=torch.float64) + weight * new.inv_freq.double()
    torch.testing.assert_close(angles.inv_freq.double(), expected, rtol=1e-6, atol=1e-12)
    assert angles.attention_factor == pytest.approx((1 - weight) * 1.1 + weight * new.attention_factor)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_the_ends_of_a_blend_are_exact(geometry: Geometries, weight: float) -> None:
    own = tuple(torch.rand(8).tolist())
    shape = geometry(base=10000.0, rotary_dim=16, layout="half", frequencies=own)
    new = Linear(factor=3).resolve(shape, None)
    found = Blend(new=new, weight=weight).resolve(shape, None).mechanism(shape)
    alone = (new if weight else Rope(frequencies=own).resolve(shape, None)).mechanism(shape)
    positions = torch.arange(1000)[None]
    expected = stock_cos_sin(positions, alone.scheme.angles(shape))  # type: ignore[attr-defined]
    for ours, theirs in zip(found.prepare(positions, positions), expected, strict=True):
        assert torch.equal(ours, theirs)
    q = torch.randn(1, 4, 1000, 16)
    ours = found.rotate_query(q, found.prepare(positions, positions))
    assert torch.equal(ours, alone.rotate_query(q, expected))


def test_a_blend_into_nothing_fades_the_rotation(geometry: Geometries) -> None:
    own = tuple(0.7**i for i in range(8))
    shape = geometry(base=10000.0, rotary_dim=16, layout="half", frequencies=own)
    mechanism = Blend(new=NoPE(), weight=0.75).resolve(shape, None).mechanism(shape)
    torch.testing.assert_close(mechanism.angles().inv_freq, 0.25 * torch.tensor(own))
    assert not Blend(new=NoPE(), weight=1.0).resolve(shape, None).mechanism(shape).angles().inv_freq.any()


def test_a_bias_comes_in_its_share(geometry: Geometries) -> None:
    shape, positions = geometry(), torch.arange(20)[None]
    whole = Alibi().mechanism(shape).bias(positions, positions)
    some = Blend(new=Alibi(), weight=0.3).resolve(shape, None).mechanism(shape)
    torch.testing.assert_close(some.bias(positions, positions), 0.3 * whole)
    assert not Blend(new=Alibi()).resolve(shape, None).mechanism(shape).biases


def test_promises_follow_from_the_parts() -> None:
    assert not PerLayer(layers={0: NoPE()}, default=Rope()).traits.causal_only  # type: ignore[arg-type]
    assert PerLayer(default=NoPE()).traits.causal_only
    assert not PerLayer(layers={0: Dynamic(factor=2)}, default=Rope()).traits.prefix_consistent  # type: ignore[arg-type]
    assert not (Sinusoidal() + Alibi()).traits.relative
    assert not (Sinusoidal() + Alibi()).traits.unbounded
    assert Blend(new=Rope(), old="rotary").traits.relative
    assert not Blend(new=Rope(), old="table").traits.relative
