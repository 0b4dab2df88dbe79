"""Schemes as values: named, shown, written as JSON and read again; resolving twice changes nothing."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from typing import ClassVar, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_posswap.errors import OptionError, SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.registry import Registry
from hf_posswap.schemes import (
    SCHEMES,
    Alibi,
    Linear,
    LongRope,
    RotaryScheme,
    Scheme,
    Yarn,
    base,
    make_scheme,
    schemes_for,
)
from hf_posswap.schemes.rope import OwnRotary

Geometries = Callable[..., Geometry]
Examples = Callable[..., Scheme]

FIRST = {"alibi", "dynamic", "learned", "linear", "llama3", "longrope", "nope", "ntk", "rope", "sinusoidal", "yarn"}


def test_the_first_schemes_are_registered_under_their_own_names() -> None:
    assert set(schemes_for("text")) >= FIRST
    for name, cls in schemes_for("text").items():
        assert cls.name == name
        assert cls.kind in ("rotary", "bias", "table", "none", "mixed")
        assert cls.source.startswith("https://")
        assert cls.summary
        assert "\n" not in cls.summary


def test_the_registry_s_annotation_can_be_evaluated() -> None:
    assert get_type_hints(base)["SCHEMES"] == Registry[type[Scheme]]


@pytest.mark.parametrize("name", list(schemes_for("text")))
def test_an_example_stands_in_every_docstring(name: str) -> None:
    assert ">>> " in (SCHEMES.get(name).__doc__ or "")


@pytest.mark.parametrize("name", list(schemes_for("text")))
@pytest.mark.parametrize("resolved", [False, True])
def test_a_scheme_comes_back_from_json_equal(
    geometry: Geometries, example: Examples, name: str, resolved: bool
) -> None:
    scheme = example(name, geometry())
    if resolved:
        scheme = scheme.resolve(geometry(), None)
    written = json.dumps(scheme.to_dict(), allow_nan=False)
    again = make_scheme(json.loads(written))
    assert again == scheme
    assert type(again) is type(scheme)
    assert hash(again) == hash(scheme)
    assert json.loads(written)["name"] == name
    assert pickle.loads(pickle.dumps(scheme)) == scheme


@pytest.mark.parametrize("name", list(schemes_for("text")))
def test_a_name_an_object_and_a_dict_mean_the_same(name: str) -> None:
    made = make_scheme(name)
    assert made == SCHEMES.get(name)()
    assert make_scheme(made) is made
    assert make_scheme({"name": name}) == made


def test_options_join_those_of_a_dict() -> None:
    assert make_scheme({"name": "yarn", "factor": 4}, beta_fast=16) == Yarn(factor=4.0, beta_fast=16.0)


@pytest.mark.parametrize("name", [name for name, cls in schemes_for("text").items() if issubclass(cls, RotaryScheme)])
@pytest.mark.parametrize("layout", [None, "interleaved"])
@pytest.mark.parametrize("rotary_dim", [None, 8])
def test_resolving_fills_every_parameter_from_the_model(
    geometry: Geometries, example: Examples, name: str, layout: str | None, rotary_dim: int | None
) -> None:
    own = {} if layout is None else {"base": 77.0, "frequencies": (1.0,) * 8}
    shape = geometry(layout=layout, rotary_dim=rotary_dim, **own)
    scheme = example(name, shape).resolve(shape, None)
    assert isinstance(scheme, RotaryScheme)
    assert (scheme.layout, scheme.rotary_dim(shape)) == (layout or "half", rotary_dim or 16)
    keeps_angles = isinstance(scheme, OwnRotary) and shape.frequencies is not None
    assert scheme.base == (10000.0 if layout is None else None if keeps_angles else 77.0)
    still_open = {f.name for f in dataclasses.fields(scheme) if getattr(scheme, f.name) is None}
    assert still_open <= {
        "base",
        "mscale",
        "mscale_all_dim",
        "frequencies",
        "pin",
        "step",
    }  # options: their absence is a value


@pytest.mark.parametrize("name", list(schemes_for("text")))
def test_what_is_given_is_kept(geometry: Geometries, name: str) -> None:
    cls = SCHEMES.get(name)
    wanted = {"base": 123.0, "partial": 0.5, "original_length": 100, "attention_factor": 1.5, "factor": 3.0, "p": 0.5}
    wanted = {f.name: wanted[f.name] for f in dataclasses.fields(cls) if f.name in wanted}
    lists = {"long_factor": (2.0,) * 4} if cls is LongRope else {}
    shape = geometry(base=9.0, layout="half", rotary_dim=16, frequencies=(1.0,) * 8)
    resolved = make_scheme(name, **cls.stand_ins(shape) | wanted | lists).resolve(shape, None)
    assert {field: getattr(resolved, field) for field in wanted} == wanted


@given(
    name=st.sampled_from(list(schemes_for("text"))),
    half=st.integers(2, 40),
    passed=st.integers(0, 9),
    original=st.integers(50, 5000),
    more=st.integers(0, 5000),
)
def test_resolving_twice_is_resolving_once(
    geometry: Geometries, example: Examples, name: str, half: int, passed: int, original: int, more: int
) -> None:
    shape = geometry(head_dim=2 * half + passed, rotary_dim=2 * half, original_length=original)
    scheme = example(name, shape)
    open_again = {f: None for f in ("factor", "group", "slowdown") if f in scheme.to_dict()}
    scheme = dataclasses.replace(scheme, **open_again)
    max_length = original if name == "blend" else original + more  # a blend ends where the old table does
    once = scheme.resolve(shape, max_length)
    assert once.resolve(shape, max_length) == once  # a factor of length / L must still reach that length
    assert once.resolve(shape, None) == once
    if "factor" in scheme.to_dict():
        assert once.reach(shape) == max_length
        grown = dataclasses.replace(shape, original_length=max_length)  # what the config says after the swap
        assert once.resolve(grown, max_length) == once


def test_a_shorter_max_length_does_not_squeeze(geometry: Geometries) -> None:
    assert Linear().resolve(geometry(), 64).factor == 1.0


@pytest.mark.parametrize(
    "name", [name for name, cls in schemes_for("text").items() if cls.kind != "table" and name != "together"]
)
def test_schemes_without_a_table_run_at_any_length(name: str) -> None:
    assert SCHEMES.get(name)().traits.unbounded == (name != "xpos")  # its factors leave the range of float32


def test_str_and_repr_show_the_fields() -> None:
    assert str(Alibi()) == "alibi"
    assert str(Linear(factor=4, base=500)) == "linear(base=500.0, factor=4.0)"
    assert repr(Linear(factor=4)) == "Linear(base=None, partial=None, layout=None, factor=4.0, original_length=None)"
    assert eval(repr(Linear(factor=4)), {"Linear": Linear}) == Linear(factor=4)


def test_a_field_without_default_is_asked_for() -> None:
    @SCHEMES.register("needy")
    @dataclasses.dataclass(frozen=True)
    class Needy(Scheme):
        """A scheme that cannot do without a width."""

        name: ClassVar[str] = "needy"
        width: int

    try:
        with pytest.raises(OptionError, match="scheme 'needy' needs 'width': it has no default"):
            make_scheme("needy")
        assert make_scheme("needy", width=3).to_dict() == {"name": "needy", "width": 3}
    finally:
        SCHEMES.remove("needy")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("ALiBi", "alibi"),
        ("RoPE", "rope"),
        ("YaRN:factor=4", "yarn"),
        ("NTK-by-parts", "ntk_by_parts"),
        ("Self-Extend", "self_extend"),
        ("leaky ReRoPE", "leaky_rerope"),
        ("T5", "t5"),
    ],
)
def test_a_name_is_found_as_papers_spell_it(text: str, name: str) -> None:
    assert make_scheme(text).name == name


def test_rope_parameters_of_a_type_without_a_scheme_are_refused() -> None:
    with pytest.raises(SchemeError, match="rope_type 'axial' .* is none of .*'yarn'.*give the scheme by name"):
        make_scheme({"rope_type": "axial", "factor": 2.0})
    with pytest.raises(OptionError, match="factr"):
        make_scheme({"rope_type": "linear", "factr": 2.0})
    with pytest.raises(OptionError, match="factor"):
        make_scheme({"rope_type": "linear", "factor": 2.0}, factor=3.0)


def test_numbers_and_arrays_of_numpy_become_those_of_python() -> None:
    scheme = make_scheme("yarn", factor=np.float32(2.5), original_length=np.int64(32), truncate=np.bool_(False))
    assert json.dumps(scheme.to_dict()) == json.dumps(
        make_scheme("yarn", factor=2.5, original_length=32, truncate=False).to_dict()
    )
    factors = np.array([1.0, 2.0, 4.0], dtype=np.float32)
    assert make_scheme("longrope", short_factor=factors, long_factor=factors * 2) == make_scheme(
        "longrope", short_factor=[1.0, 2.0, 4.0], long_factor=[2.0, 4.0, 8.0]
    )
    with pytest.raises(SchemeError, match="original_length must be a whole number"):
        make_scheme("yarn", original_length=np.float64(32.5))
