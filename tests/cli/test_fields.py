"""Values on the command line: by the declared type, there and back; every field and trait documented."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_posswap.cli.listing import describe_fields, format_value
from hf_posswap.schemes import SCHEMES, PerLayer, RNoPE, Traits, schemes_for
from hf_posswap.utils.scheme_text import attribute_docs, describe_type, field_kinds, parse_value

NUMBERS = st.floats(allow_nan=False)


@given(st.none() | NUMBERS)
def test_a_written_number_reads_back_equal(value: float | None) -> None:
    assert parse_value(format_value(value), float | None) == value


@given(st.none() | st.lists(NUMBERS, min_size=1).map(tuple))
def test_lists_of_numbers_come_back(value: tuple[float, ...] | None) -> None:
    assert parse_value(format_value(value), tuple[float, ...] | None) == value


@given(st.booleans() | st.none() | st.integers())
def test_a_union_comes_back(value: bool | int | None) -> None:
    back = parse_value(format_value(value), bool | int | None)
    assert back == value
    assert type(back) is type(value)


def test_text_is_asked_last() -> None:
    assert parse_value("4", str | int) == 4
    assert parse_value("four", str | int) == "four"
    assert parse_value("match", float | Literal["match"]) == "match"
    assert parse_value("0.5", float | Literal["match"]) == 0.5


def test_schemes_are_names_or_json() -> None:
    kinds = field_kinds(RNoPE)
    assert parse_value("yarn", kinds["rotary"]) == "yarn"
    assert parse_value("none", kinds["rotary"]) is None
    assert parse_value('{"name": "yarn", "factor": 4}', kinds["rotary"]) == {"name": "yarn", "factor": 4}
    assert parse_value('{"0": "nope"}', field_kinds(PerLayer)["layers"]) == {"0": "nope"}
    assert parse_value("1,3", kinds["layers"]) == (1, 3)
    for text in ("{0: nope}", '{"0": '):
        with pytest.raises(ValueError):  # noqa: PT011  (the caller says what was expected)
            parse_value(text, field_kinds(PerLayer)["layers"])
    with pytest.raises(ValueError):  # noqa: PT011
        parse_value("nope", field_kinds(PerLayer)["layers"])


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("abc", float),
        ("", float | None),
        ("1.5", int),
        ("1e3", int | None),
        ("yes", bool),
        ("1", bool),
        ("quarter", Literal["half", "interleaved"]),
        ("1,,2", tuple[float, ...]),
        ("", tuple[float, ...]),
        ("1,two", tuple[float, ...] | None),
        ("{}", dict[str, int]),
    ],
)
def test_what_is_no_value_is_refused(text: str, kind: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (the caller says what was expected)
        parse_value(text, kind)


@pytest.mark.parametrize("name", list(schemes_for("text")))
def test_every_field_of_a_scheme_is_documented_and_settable(name: str) -> None:
    cls = SCHEMES.get(name)
    fields = describe_fields(cls)
    assert [field["name"] for field in fields] == [field.name for field in dataclasses.fields(cls)]
    for field in fields:
        assert field["meaning"], f"{name}.{field['name']} has no line under Attributes"
        assert "not to be written" not in field["type"]


@pytest.mark.parametrize("name", list(schemes_for("text")))
def test_the_defaults_given_on_the_command_line_are_the_defaults(name: str) -> None:
    cls = SCHEMES.get(name)
    kinds = field_kinds(cls)
    given = {f["name"]: parse_value(format_value(f["default"]), kinds[f["name"]]) for f in describe_fields(cls)}
    assert cls(**given) == cls()


def test_every_trait_is_documented_and_has_a_letter_of_its_own() -> None:
    names = [field.name for field in dataclasses.fields(Traits)]
    assert set(names) <= set(attribute_docs(Traits))
    assert len({name[0] for name in names}) == len(names)


def test_types_are_described_in_words() -> None:
    assert describe_type(Literal["half", "interleaved"] | None) == "half or interleaved or none"
    assert describe_type(tuple[float, ...] | None) == "a list, with commas, each a number or none"
    assert describe_type(bool) == "true or false"


def test_a_field_of_a_base_class_may_be_documented_again() -> None:
    class Base:
        """One.

        Attributes:
            a: of the base.
            b: of the base,
                over two lines: with a colon.

        Raises:
            ValueError: never.
        """

    class Derived(Base):
        """Two.

        Attributes:
            a: of its own.
        """

    assert attribute_docs(Derived) == {"a": "of its own.", "b": "of the base, over two lines: with a colon."}
