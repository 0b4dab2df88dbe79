"""Parameters that are possible alone and not for this model: one `SchemeError` that says why and what would do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes import Linear, RotaryScheme, Scheme, make_scheme, schemes_for

Geometries = Callable[..., Geometry]
Examples = Callable[..., Scheme]


def refuse_model(scheme: Scheme, geometry: Geometry, max_length: Any = None) -> str:
    with pytest.raises(SchemeError) as caught:
        scheme.resolve(geometry, max_length)
    assert str(caught.value).startswith(f"{scheme.name}: ")
    return str(caught.value)


SCALED = [
    name
    for name, cls in schemes_for("text").items()
    if any(field.name == "factor" for field in dataclasses.fields(cls))
]


@pytest.mark.parametrize("name", SCALED)
def test_neither_factor_nor_max_length(geometry: Geometries, name: str) -> None:
    assert refuse_model(make_scheme(name), geometry()) == (
        f"{name}: give factor or max_length; the model's own length is 128 tokens."
    )


@pytest.mark.parametrize("name", SCALED)
def test_a_max_length_beyond_the_factor(geometry: Geometries, example: Examples, name: str) -> None:
    scheme = example(name, geometry(), factor=2.5)
    assert refuse_model(scheme, geometry(), 390) == (
        f"{name}: factor 2.5 reaches 320 tokens from the original 128, but max_length is 390; "
        "give factor >= 3.047, or one of the two alone."
    )
    assert example(name, geometry(), factor=3.047).resolve(geometry(), 390).reach(geometry()) == 390  # the advice works


@pytest.mark.parametrize("name", list(schemes_for("text")))
@pytest.mark.parametrize("value", [0, -128, 256.0, "256", True])
def test_max_length_is_a_number_of_tokens(geometry: Geometries, example: Examples, name: str, value: Any) -> None:
    assert refuse_model(example(name, geometry()), geometry(), value) == (
        f"{name}: max_length must be a whole number of tokens >= 1, got {value!r}."
    )


@pytest.mark.parametrize("name", [name for name, cls in schemes_for("text").items() if issubclass(cls, RotaryScheme)])
@pytest.mark.parametrize(("head_dim", "partial", "width"), [(33, None, 33), (16, 0.2, 3), (16, 0.01, 0)])
def test_widths_that_have_no_pairs(
    geometry: Geometries, name: str, head_dim: int, partial: float | None, width: int
) -> None:
    shape = geometry(head_dim=head_dim)
    options = {"factor": 2} if name in SCALED else {}
    message = refuse_model(make_scheme(name, partial=partial, **options), shape)
    assert "needs an even number of dimensions a head, at least 2" in message
    assert f"head_dim {head_dim} with partial={partial} gives {width}; choose partial" in message


@pytest.mark.parametrize("name", ["ntk", "dynamic"])
def test_one_pair_cannot_be_stretched(geometry: Geometries, name: str) -> None:
    message = refuse_model(make_scheme(name, factor=2), geometry(head_dim=2))
    assert message == f"{name}: needs a rotary width of at least 4, here it is 2; use 'linear' or 'yarn' instead."


@pytest.mark.parametrize("name", ["ntk", "dynamic"])
def test_a_base_stretched_beyond_float32(geometry: Geometries, name: str) -> None:
    message = refuse_model(make_scheme(name, factor=1e6, base=1e30), geometry(head_dim=4))
    assert "factor 1e+06 takes base 1e+30 to " in message
    assert "more than float32 holds (3.40282e+38); give a smaller factor or base." in message


def test_longrope_needs_its_factors(geometry: Geometries) -> None:
    scheme = make_scheme("longrope", factor=2)
    assert "long_factor is required: 8 divisors, one for each rotary pair." in refuse_model(scheme, geometry())


@pytest.mark.parametrize("field", ["short_factor", "long_factor"])
def test_longrope_lists_of_the_wrong_length(geometry: Geometries, field: str) -> None:
    scheme = make_scheme("longrope", factor=2, **{"long_factor": [1.0] * 8} | {field: [1.0, 2.0]})
    message = refuse_model(scheme, geometry())
    assert f"{field} needs one divisor for each of this model's 8 rotary pairs, got 2." in message


def test_longrope_of_one_token(geometry: Geometries) -> None:
    scheme = make_scheme("longrope", factor=2, long_factor=[1.0] * 8)
    assert "an original length of 1 token gives no attention factor" in refuse_model(
        scheme, geometry(original_length=1)
    )
    given = make_scheme("longrope", factor=2, long_factor=[1.0] * 8, attention_factor=1.5)
    assert given.resolve(geometry(original_length=1), None) is not None


def test_an_open_scheme_says_that_it_must_be_resolved(geometry: Geometries) -> None:
    with pytest.raises(SchemeError, match=r"linear: base is still open \(None\): call resolve\(geometry, max_length\)"):
        Linear(factor=4).native_rope(geometry())
    for name in SCALED:
        with pytest.raises(SchemeError, match="is still open"):
            make_scheme(name).angles(geometry())  # type: ignore[attr-defined]
        with pytest.raises(SchemeError, match="is still open"):
            make_scheme(name).native_rope(geometry())  # type: ignore[attr-defined]
