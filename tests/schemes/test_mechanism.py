"""What every mechanism inside attention promises, whichever scheme it comes from: all registered names."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_posswap.geometry import Geometry
from hf_posswap.schemes import SCHEMES, Mechanism, Rope, Scheme, schemes_for
from hf_posswap.schemes.piecewise import Windowed
from hf_posswap.testing.contract.outside import is_local, rows, scores

Geometries = Callable[..., Geometry]
Examples = Callable[..., Scheme]

INSIDE = [name for name, cls in schemes_for("text").items() if cls.kind in ("rotary", "bias")]
OUTSIDE = [name for name, cls in schemes_for("text").items() if cls.kind == "table"]
ROTARY = [name for name, cls in schemes_for("text").items() if cls.kind == "rotary"]
LEARNED = {"t5", "kerple", "fire"}
"""Those that bring parameters of their own."""


@pytest.mark.parametrize("name", [name for name in INSIDE if SCHEMES.get(name)().traits.relative])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_relative_schemes_do_not_see_a_shift(geometry: Geometries, example: Examples, name: str, layout: str) -> None:
    shape = geometry(layout=layout, num_heads=3, num_kv_heads=3, head_dim=20)
    scheme = example(name, shape).resolve(shape, None)

    @settings(max_examples=10)
    @given(shift=st.integers(-3, 3000), length=st.integers(1, 40), current=st.sampled_from([40, 1000]))
    def check(shift: int, length: int, current: int) -> None:
        query, key = torch.randn(2, 1, 3, length, 20)
        positions = torch.arange(3, 3 + length)[None]
        mechanism = scheme.mechanism(shape)
        here = scores(mechanism, query, key, positions, rows(current))
        there = scores(mechanism, query, key, positions + shift, rows(current))
        # a float32 angle of p radians is off by some p * 2^-23; unit vectors of 20 dimensions score about 1
        torch.testing.assert_close(there, here, rtol=0, atol=(100 + abs(shift)) * 2.0**-20)

    check()


@pytest.mark.parametrize("name", INSIDE)
def test_the_mechanism_changes_the_scores(geometry: Geometries, example: Examples, name: str) -> None:
    shape = geometry()
    query, key = torch.randn(2, 1, 4, 7, 16)
    mechanism = example(name, shape).resolve(shape, None).mechanism(shape)
    ours = scores(mechanism, query, key, torch.arange(7)[None], rows(7))
    bare = query @ key.mT / 4
    assert (ours - bare).abs().max() > 0.1


@pytest.mark.parametrize("name", [name for name in INSIDE if name not in LEARNED])
def test_constants_stay_float32_whatever_is_done_to_the_model(
    geometry: Geometries, example: Examples, name: str
) -> None:
    shape = geometry()
    scheme = example(name, shape).resolve(shape, None)
    query, key = torch.randn(2, 1, 4, 7, 16)
    positions = torch.arange(7)[None] + 900
    expected = scores(scheme.mechanism(shape), query, key, positions, rows(907))
    assert torch.equal(scores(scheme.mechanism(shape).to(torch.bfloat16), query, key, positions, rows(907)), expected)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as from_pretrained(dtype=bfloat16) does while it builds
    try:
        with torch.device("meta"):
            made = scheme.mechanism(shape)
        assert torch.equal(scores(made, query, key, positions, rows(907)), expected)
    finally:
        torch.set_default_dtype(before)
    assert list(made.state_dict()) == []


@pytest.mark.parametrize("name", sorted(LEARNED))
def test_learned_parameters_are_float32_and_rounded_only_by_a_cast(
    geometry: Geometries, example: Examples, name: str
) -> None:
    shape, positions = geometry(), torch.arange(7)[None] + 900
    scheme = example(name, shape).resolve(shape, None)
    mechanism = scheme.mechanism(shape)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            skeleton = scheme.mechanism(shape)
        other = scheme.mechanism(shape)
    finally:
        torch.set_default_dtype(before)
    assert {p.dtype for p in mechanism.parameters()} == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(mechanism.parameters(), other.parameters(), strict=True))
    assert all(p.is_meta and p.dtype == torch.float32 for p in skeleton.parameters())
    skeleton.load_state_dict(mechanism.state_dict(), assign=True)  # as from_pretrained fills it
    exact = mechanism.bias(positions, positions)
    assert torch.equal(skeleton.bias(positions, positions), exact)
    rounded = copy.deepcopy(mechanism).to(torch.bfloat16)
    back = copy.deepcopy(rounded).float()  # the same numbers: all arithmetic is in float32
    assert rounded.bias(positions, positions).dtype == torch.float32
    assert torch.equal(rounded.bias(positions, positions), back.bias(positions, positions))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(mechanism.bias(positions, positions), exact)


@pytest.mark.parametrize("name", sorted(LEARNED))
def test_learned_parameters_do_not_touch_torch_s_random_numbers(
    geometry: Geometries, example: Examples, name: str
) -> None:
    shape = geometry()
    scheme = example(name, shape).resolve(shape, None)
    state = torch.get_rng_state()
    one, other = scheme.mechanism(shape), scheme.mechanism(shape)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    another = dataclasses.replace(scheme, seed=1).mechanism(shape)  # type: ignore[call-arg]
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), another.parameters(), strict=True))


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("again", [copy.deepcopy, lambda mechanism: pickle.loads(pickle.dumps(mechanism))])
def test_copies_compute_the_same(
    geometry: Geometries, example: Examples, name: str, again: Callable[[Mechanism], Mechanism]
) -> None:
    shape = geometry()
    mechanism = example(name, shape).resolve(shape, None).mechanism(shape)
    query, key = torch.randn(2, 1, 4, 7, 16)
    arguments = (query, key, torch.arange(7)[None] + 5, rows(200))
    assert torch.equal(scores(again(mechanism), *arguments), scores(mechanism, *arguments))


@pytest.mark.parametrize("name", INSIDE)
def test_rows_of_a_batch_have_positions_and_lengths_of_their_own(
    geometry: Geometries, example: Examples, name: str
) -> None:
    shape = geometry()
    mechanism = example(name, shape).resolve(shape, None).mechanism(shape)
    query, key = torch.randn(2, 3, 4, 7, 16)
    positions = torch.stack((torch.arange(7), torch.arange(7) + 120, torch.arange(7) + 393))
    together = scores(mechanism, query, key, positions, rows(7, 127, 400))
    for row, length in enumerate((7, 127, 400)):
        one = slice(row, row + 1)
        alone = scores(mechanism, query[one], key[one], positions[one], rows(length))
        torch.testing.assert_close(together[one], alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in ROTARY if not issubclass(SCHEMES.get(name), Windowed)])
def test_only_prefix_consistent_schemes_may_cache_rotated_keys(
    geometry: Geometries, example: Examples, name: str
) -> None:
    shape = geometry()
    scheme = example(name, shape).resolve(shape, None)
    mechanism = scheme.mechanism(shape)
    key, positions = torch.randn(1, 4, 7, 16), torch.arange(7)[None]
    early = mechanism.rotate_key(key, mechanism.prepare(positions, rows(7)))
    late = mechanism.rotate_key(key, mechanism.prepare(positions, rows(4 * shape.original_length)))
    assert torch.equal(early, late) == mechanism.stores_rotated_keys == scheme.traits.prefix_consistent


@pytest.mark.parametrize("name", list(schemes_for("text")))
def test_a_sequence_may_be_split_exactly_where_that_is_promised(
    geometry: Geometries, example: Examples, name: str
) -> None:
    """What the first part of a text needs must be what it would get in the whole, and no more than q and k."""
    shape = geometry(original_length=64)
    scheme = example(name, shape).resolve(shape, None)
    assert scheme.traits.shardable == is_local(scheme, shape)


@pytest.mark.parametrize("name", ROTARY)
def test_layouts_differ_by_a_permutation_of_the_head(geometry: Geometries, example: Examples, name: str) -> None:
    half, interleaved = geometry(layout="half"), geometry(layout="interleaved")
    order = torch.arange(16).view(2, 8).T.flatten()  # interleaved place -> half-split place
    query, key = torch.randn(2, 1, 4, 7, 16)
    positions, length = torch.arange(7)[None], rows(7)
    one = example(name, half).resolve(half, None).mechanism(half)
    other = example(name, interleaved).resolve(interleaved, None).mechanism(interleaved)
    expected = scores(one, query, key, positions, length)
    got = scores(other, query[..., order], key[..., order], positions, length)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    wrong = scores(other, query, key, positions, length)
    assert (wrong - expected).abs().max() > 0.1


@pytest.mark.parametrize("name", OUTSIDE)
def test_the_others_say_that_they_do_not_act_there(geometry: Geometries, example: Examples, name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"scheme '{name}' has kind .* does not act inside attention"):
        example(name, geometry()).mechanism(geometry())


def test_a_mechanism_shows_its_scheme(geometry: Geometries) -> None:
    shape = geometry(head_dim=16)
    shown = repr(Rope().resolve(shape, None).mechanism(shape))
    assert shown == "RotaryMechanism(rope(base=10000.0, partial=1.0, layout='half'))"
