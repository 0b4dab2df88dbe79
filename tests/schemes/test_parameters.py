"""Every impossible parameter raises one `SchemeError` that says what was given and what was expected."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

from hf_posswap.errors import OptionError, PosswapError, SchemeError, UnknownNameError
from hf_posswap.schemes import SCHEMES, Linear, RotaryScheme, Scheme, SSMax, make_scheme, schemes_for
from hf_posswap.utils.printable import brief_repr

NAN, INF = float("nan"), float("inf")
NOT_NUMBERS: list[Any] = [NAN, INF, -INF, True, "4", [4.0], 10**400]

# field: what its message must say it expects, and numbers that are out of its bounds
NUMBERS: dict[str, tuple[str, list[float]]] = {
    "base": ("a finite number > 1", [-10000.0, 0, 1]),
    "partial": ("a finite number > 0 and <= 1", [-0.5, 0, 1.5]),
    "factor": ("a finite number >= 1 and <= 1e+06", [0.5, 0, -4, 1e7]),
    "beta_fast": ("a finite number > 0", [0, -1.0]),
    "beta_slow": ("a finite number > 0", [0, -1.0]),
    "attention_factor": ("a finite number > 0", [0, -1.0]),
    "mscale": ("a finite number > 0", [0, -1.0]),
    "mscale_all_dim": ("a finite number > 0", [0, -1.0]),
    "low_freq_factor": ("a finite number > 0", [0, -1.0]),
    "high_freq_factor": ("a finite number > 0", [0, -1.0]),
    "alpha": ("a finite number", []),
    "p": ("a finite number > 0 and <= 1", [0, -0.5, 1.01]),
    "gamma": ("a finite number > 0", [0, -0.4]),
    "logit_scale": ("a finite number >= 0", [-0.1, 1e7]),
    "weight": ("a finite number >= 0 and <= 1", [-0.1, 1.5]),
    "scale_base": ("a finite number > 0", [0, -512.0]),
    "scale": ("number > 0", [0, -2.0]),
    "ridge": ("a finite number > 0", [0, -1.0]),
    "residual": ("a finite number >= 0", [-0.1]),
    "growth": ("a finite number >= 0", [-0.1]),
    "interpolation": ("a finite number >= 1 and <= 1e+06", [0.5, 0, -4, 1e7]),
    "std": ("a finite number > 0", [0, -0.1]),
    "init_std": ("a finite number >= 0", [-0.1, 1e4]),
    "c": ("a finite number > 0", [0, -0.1, 1e7]),
    "slowdown": ("a finite number >= 1 and <= 1e+06", [0.5, -2.0, 1e7]),
    "s": ("a finite number > 0 and <= 1e+06", [0, -0.5, 1e7]),
    "threshold": ("a finite number > 0", [0, -512.0, 1e10]),
}
WHOLES: dict[str, tuple[int, int]] = {
    "every": (2, 2**16),
    "group": (2, 2**31),
    "faded": (2, 2**20),
    "original_positions": (0, 2**31),
    "num_buckets": (2, 4096),
    "max_distance": (1, 2**20),
    "width": (1, 4096),
    "seed": (0, 2**63 - 1),
}
LENGTHS = ["original_length", "centre", "window", "chunk", "shift", "local", "pin", "step"]
LISTS = {"short_factor": "> 0", "long_factor": "> 0", "frequencies": ">= 0", "slopes": ">= 0", "r1": "> 0", "r2": "> 0"}
"""Lists with a number for each pair, or head, and the bound of their entries."""
CHOICES: dict[str, list[str]] = {
    "layout": ["'half'|'halves'", "'interleaved'"],
    "ramp": ["'index'", "'turns'"],
    "mix": ["'frequencies'", "'wavelengths'"],
    "follow": ["'sequence'", "'query'"],
    "variant": ["'log'", "'power'"],
    "select": ["'first'", "'last'", "'uniform'"],
    "extend": ["'tile'", "'interpolate'", "'group'", "'hierarchical'"],
    "old": ["'table'", "'rotary'"],
}
FLAGS = ["truncate", "log_scaling", "learned"]
TABLES = ["start"]
"""Lists of lists of numbers: see the test of their scheme."""
NESTED = ["layers", "default", "rotary", "table", "inside", "new", "terms"]
"""Those that hold schemes or layers: see test_composition.py."""

FIELDS = [
    (name, field.name)
    for name, cls in {**schemes_for("text"), "ssmax": SSMax}.items()
    for field in dataclasses.fields(cls)
]


def refuse(name: str, **options: Any) -> str:
    with pytest.raises(SchemeError) as caught:
        make_scheme(name, **options)
    assert str(caught.value).startswith(f"{name}: ")
    return str(caught.value)


def test_every_field_of_every_scheme_is_tested_here() -> None:
    assert {field for _, field in FIELDS} == {*NUMBERS, *WHOLES, *LENGTHS, *LISTS, *CHOICES, *FLAGS, *TABLES, *NESTED}


@pytest.mark.parametrize(("name", "field"), [pair for pair in FIELDS if pair[1] in NUMBERS])
def test_what_is_no_number_within_bounds_is_refused(name: str, field: str) -> None:
    expected, beyond = NUMBERS[field]
    for value in [*NOT_NUMBERS, *beyond]:
        message = refuse(name, **{field: value})
        assert f"{field} must be" in message
        assert expected in message
        assert message.endswith(f"got {brief_repr(value)}.")


@pytest.mark.parametrize(("name", "field"), [pair for pair in FIELDS if pair[1] in WHOLES])
def test_what_is_no_whole_number_within_bounds_is_refused(name: str, field: str) -> None:
    least, most = WHOLES[field]
    assert getattr(make_scheme(name, **{field: least}), field) == least
    assert getattr(make_scheme(name, **{field: most}), field) == most
    optional = [] if getattr(SCHEMES.get(name)(), field) is None else [None]
    for value in [*NOT_NUMBERS, *optional, 8.0, least - 1, most + 1]:
        message = refuse(name, **{field: value})
        assert message == f"{name}: {field} must be a whole number from {least} to {most}, got {brief_repr(value)}."


@pytest.mark.parametrize(("name", "field"), [pair for pair in FIELDS if pair[1] in LENGTHS])
@pytest.mark.parametrize("value", [0, -1, 1.5, 512.0, True, "512", NAN])
def test_what_is_no_length_is_refused(name: str, field: str, value: Any) -> None:
    assert refuse(name, **{field: value}) == (
        f"{name}: {field} must be a whole number of tokens >= 1, got {brief_repr(value)}."
    )


@pytest.mark.parametrize(("name", "field"), [pair for pair in FIELDS if pair[1] in LISTS])
@pytest.mark.parametrize("value", [[], 2.0, "1,2", {"a": 1}])
def test_what_is_no_list_is_refused(name: str, field: str, value: Any) -> None:
    message = refuse(name, **{field: value})
    each = "head" if field in ("slopes", "r1", "r2") else "rotary pair"
    assert message == f"{name}: {field} must be a list of numbers, one a {each}, got {brief_repr(value)}."


@pytest.mark.parametrize(("name", "field"), [pair for pair in FIELDS if pair[1] in LISTS])
@pytest.mark.parametrize("value", [0.0, -1.0, NAN, INF, True, "2", None])
def test_entries_of_lists_out_of_bounds_are_refused(name: str, field: str, value: Any) -> None:
    if value == 0.0 and LISTS[field] == ">= 0":
        assert getattr(make_scheme(name, **{field: [1.0, value]}), field) == (1.0, 0.0)
        return
    message = refuse(name, **{field: [1.0, value]})
    assert message == f"{name}: {field}[1] must be a finite number {LISTS[field]}, got {brief_repr(value)}."


@pytest.mark.parametrize(("name", "field"), [pair for pair in FIELDS if pair[1] in CHOICES])
@pytest.mark.parametrize("value", ["hlaf", "", 3, True, ["half"]])
def test_what_is_no_choice_is_refused(name: str, field: str, value: Any) -> None:
    message = refuse(name, **{field: value})
    assert f"{field} must be one of " in message
    assert message.endswith(f"got {brief_repr(value)}.")
    for choice in CHOICES[field]:
        assert re.search(choice, message)


@pytest.mark.parametrize(("name", "field"), [pair for pair in FIELDS if pair[1] in FLAGS])
@pytest.mark.parametrize("value", [1, 0, "yes"])
def test_what_is_no_flag_is_refused(name: str, field: str, value: Any) -> None:
    assert refuse(name, **{field: value}) == f"{name}: {field} must be True or False, got {brief_repr(value)}."


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("yarn", {"beta_fast": 1, "beta_slow": 32}, "beta_fast must be greater than beta_slow, got 1 and 32."),
        ("yarn", {"beta_fast": 2, "beta_slow": 2}, "beta_fast must be greater than beta_slow, got 2 and 2."),
        ("yarn", {"mscale": 0.7}, "act together, got mscale=0.7 and mscale_all_dim=None; give both, or"),
        ("yarn", {"mscale_all_dim": 0.7}, "act together, got mscale=None and mscale_all_dim=0.7; give both, or"),
        ("llama3", {"low_freq_factor": 4}, "high_freq_factor must be greater than low_freq_factor, got 4 and 4."),
        ("learned", {"alpha": 0.5}, "alpha must lie in (0, 1) and not be 0.5, got 0.5."),
        ("learned", {"alpha": 1}, "alpha must lie in (0, 1) and not be 0.5, got 1."),
        ("learned", {"alpha": -0.1}, "alpha must lie in (0, 1) and not be 0.5, got -0.1."),
        ("sinusoidal", {"scale": "mach"}, "scale must be 'match' or a number > 0, got 'mach'."),
        ("dynamic", {"step": 8}, "step=8 goes with follow='query', got 'sequence'."),
        ("longrope", {"pin": 8, "follow": "query"}, "chooses angles for each token, pin=8 one for all; give one"),
        ("nope", {"pin": 8}, "pin=8 acts through logit_scale, which is not given."),
        ("rnope", {"every": 2, "layers": [1]}, "give every=2 or layers=[1], not both."),
        ("rope", {"base": 500, "frequencies": [1.0]}, "got base=500 as well; give one of the two."),
        ("rope", {"base": 1e39}, "base must be a finite number > 1 and <= 3.40282e+38, got 1e+39."),
    ],
)
def test_parameters_that_contradict_each_other(name: str, options: dict[str, Any], says: str) -> None:
    assert says in refuse(name, **options)


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda: make_scheme("yarm"), UnknownNameError, "unknown scheme 'yarm'. Did you mean 'yarn'? Known: alibi, "),
        (
            lambda: make_scheme("yarn", faktor=4),
            OptionError,
            "scheme 'yarn' has no field 'faktor'. Did you mean 'factor'? It has: base, ",
        ),
        (
            lambda: make_scheme("nope", x=1, y=2),
            OptionError,
            "scheme 'nope' has no field 'x', 'y'. It has: logit_scale",
        ),
        (lambda: make_scheme("rope", scheme=1), OptionError, "scheme 'rope' has no field 'scheme'."),
        (lambda: make_scheme(Linear(factor=2.0), factor=4), OptionError, "options ['factor'] were given with the"),
        (lambda: make_scheme({"name": "yarn", 3: 4}), OptionError, "scheme 'yarn' has no field 3."),
        (lambda: make_scheme({"factor": 4}), SchemeError, "needs its name under 'name', as Scheme.to_dict writes it"),
        (lambda: make_scheme({"factor": 4}), SchemeError, "or under 'rope_type', as transformers does; got {'fac"),
        (lambda: make_scheme({"0": "nope", "x": "rope"}), SchemeError, "needs its name under 'name'"),
        (lambda: make_scheme({"-1": "nope"}), SchemeError, "per_layer: "),
        (lambda: make_scheme({"name": ["yarn"]}), SchemeError, "needs its name under 'name'"),
        (lambda: make_scheme({"name": "ntk", "factor": 4}, factor=8), OptionError, "give them once."),
        (lambda: make_scheme(7), SchemeError, "a scheme is an object, a name or a dict, got int: 7."),
        (lambda: make_scheme(None), SchemeError, "a scheme is an object, a name or a dict, got NoneType: None."),
        (lambda: make_scheme(Linear), SchemeError, "a scheme is an object, a name or a dict, got type: "),
    ],
)
def test_make_scheme_refuses_unknown_names_and_options(
    call: Callable[[], Scheme], kind: type[PosswapError], says: str
) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert says in str(caught.value)


@pytest.mark.parametrize("cls", [cls for _, cls in SCHEMES.items() if issubclass(cls, RotaryScheme)])
def test_a_rotary_scheme_takes_no_number_without_its_name(cls: type[Scheme]) -> None:
    """Yarn(4) would be base 4, and quietly destroy the model."""
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        cls(4)  # type: ignore[call-arg]


def test_layers_may_be_named_as_in_json() -> None:
    layers = {"0": "nope", "1": {"name": "yarn", "factor": 4}}
    expected = make_scheme({int(layer): scheme for layer, scheme in layers.items()})
    assert make_scheme(layers) == expected == make_scheme({"name": "per_layer", "layers": layers})
