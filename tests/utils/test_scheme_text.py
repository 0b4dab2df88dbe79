"""Schemes with fields as text: one way is read, and every other is answered with it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from hf_posswap import patch_model, swap_plan
from hf_posswap.cli.listing import format_value
from hf_posswap.errors import OptionError, PosswapError, UnknownNameError
from hf_posswap.schemes import LongRope, PerLayer, RNoPE, Rope, Yarn, make_scheme

NUMBERS = st.floats(min_value=1, max_value=1e6)
RIGHT = re.compile(r"; write (\S+)$")
WAYS: dict[str, Callable[[dict[str, str]], str]] = {
    "call": lambda fields: f"yarn({', '.join(f'{name}={value}' for name, value in fields.items())})",
    "words": lambda fields: " ".join(["yarn", *(f"{name}={value}" for name, value in fields.items())]),
    "options": lambda fields: " ".join(
        ["yarn", *(f"--{name.replace('_', '-')} {value}" for name, value in fields.items())]
    ),
    "colons": lambda fields: ":".join(["yarn", *(f"{name}={value}" for name, value in fields.items())]),
    "colons alone": lambda fields: ":".join(["yarn", *(f"{name}:{value}" for name, value in fields.items())]),
    "json": lambda fields: json.dumps({"name": "yarn", **{name: float(value) for name, value in fields.items()}}),
    "yaml": lambda fields: f"{{name: yarn, {', '.join(f'{name}: {value}' for name, value in fields.items())}}}",
    "nested yaml": lambda fields: f"yarn: {{{', '.join(f'{name}: {value}' for name, value in fields.items())}}}",
    "brackets": lambda fields: f"yarn[{','.join(f'{name}={value}' for name, value in fields.items())}]",
    "spaces": lambda fields: f"yarn: {', '.join(f'{name} = {value}' for name, value in fields.items())}",
    "semicolons": lambda fields: f"yarn;{';'.join(f'{name}={value}' for name, value in fields.items())}",
}


@given(factor=NUMBERS, base=NUMBERS.map(lambda value: value + 1))
def test_what_is_written_is_what_keywords_give(factor: float, base: float) -> None:
    fields = {"factor": factor, "base": base}
    text = "yarn:" + ",".join(f"{name}={format_value(value)}" for name, value in fields.items())
    assert make_scheme(text) == Yarn(**fields)


@given(st.lists(NUMBERS, min_size=1), NUMBERS)
def test_the_commas_of_a_list_are_its_own(divisors: list[float], factor: float) -> None:
    text = f"longrope:long_factor={format_value(divisors)},factor={format_value(factor)}"
    assert make_scheme(text) == LongRope(long_factor=tuple(divisors), factor=factor)


def test_a_scheme_may_hold_another_by_name_or_json() -> None:
    assert make_scheme("rnope:every=2,rotary=rope") == RNoPE(every=2, rotary=Rope())
    held = 'rnope:rotary={"name": "yarn", "factor": 4, "base": 500},every=2'
    assert make_scheme(held) == RNoPE(every=2, rotary=Yarn(factor=4.0, base=500.0))
    assert make_scheme('per_layer:layers={"0": "nope"},default=rope') == make_scheme(
        PerLayer(layers={0: "nope"}, default="rope").to_dict()  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fields", [{"factor": "4"}, {"factor": "4", "base": "500000", "beta_fast": "16.5"}])
def test_another_way_is_refused_with_the_right_one(way: str, fields: dict[str, str]) -> None:
    text = WAYS[way](fields)
    if text == f"yarn:{','.join(f'{name}={value}' for name, value in fields.items())}":
        return  # one field between colons is the right way
    with pytest.raises(OptionError, match="NAME:FIELD=VALUE,FIELD=VALUE") as refused:
        make_scheme(text)
    found = RIGHT.search(str(refused.value))
    assert found is not None, refused.value
    assert make_scheme(found[1]) == Yarn(**{name: float(value) for name, value in fields.items()})


@given(st.text(alphabet="yarn:factor=4,({[\"' })]-;\n", max_size=24))
def test_a_text_is_a_scheme_or_refused_and_what_is_suggested_is_one(text: str) -> None:
    try:
        assert make_scheme(text).name
    except PosswapError as refused:
        found = RIGHT.search(str(refused))
        if found is not None:
            assert make_scheme(found[1]).name


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("yran:factor=4", UnknownNameError, "unknown scheme 'yran'. Did you mean 'yarn'?"),
        ("yarn:", OptionError, "'yarn:': a scheme with fields is written NAME:FIELD=VALUE,FIELD=VALUE, such as"),
        ("yarn:4", OptionError, "yarn:4: '4' is not FIELD=VALUE, such as yarn:factor=4,base=500000."),
        ("yarn:faktor=4", OptionError, "scheme 'yarn' has no field 'faktor'. Did you mean 'factor'? It has: base,"),
        ("yarn:factor=4,factor=5", OptionError, "factor is written twice; write each field once."),
        ("yarn:factor=four", OptionError, "factor of 'yarn' must be a number or none, got 'four'."),
        ("yarn:max_length=64", OptionError, "Give it as an option: max_length=..., on the command line --max-le"),
        ("yarn:factor=0.5", PosswapError, "yarn: factor must be a finite number >= 1"),
    ],
)
def test_what_is_wrong_is_said(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make_scheme(text)


def test_a_text_and_keywords_are_joined_and_none_is_given_twice() -> None:
    assert make_scheme("yarn:factor=4", base=500) == Yarn(factor=4.0, base=500)
    with pytest.raises(
        OptionError, match=r"options \['factor'\] were given twice, here and in a text of scheme 'yarn'"
    ):
        make_scheme("yarn:factor=4", factor=8)


def test_python_takes_the_text_too_and_tells_near_names_of_keywords() -> None:
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=11)
    )
    with pytest.raises(OptionError, match=r"no field 'max_lenght'. Did you mean 'max_length'\? Give it as an option"):
        patch_model(model, "rope", max_lenght=64)
    with pytest.raises(OptionError, match=r"; write yarn:factor=4$"):
        patch_model(model, "yarn(factor=4)")
    assert swap_plan(patch_model(model, "yarn:factor=4,beta_fast=16")).scheme.beta_fast == 16.0  # type: ignore[attr-defined]
