"""From a mapping to frozen dataclasses, by pydantic.

It reads stdlib dataclasses as they are, and says every problem at once with its place; HfArgumentParser is flat and
ends at the first problem, and OmegaConf knows no unions of types.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

from hf_posswap.errors import MissingDependencyError
from hf_posswap.training.config.old_keys import OLD, SECTIONS
from hf_posswap.training.config.problems import Problems
from hf_posswap.utils.printable import brief_repr, printable

T = TypeVar("T")
Place = tuple[str | int, ...]

_UNKNOWN = "unexpected_keyword_argument"
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a number",
    "bool": "true or false",
    "string": "text",
    "path": "a path",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "dict": "keys and values",
    "mapping": "keys and values",
    "dataclass": "keys and values",
}
"""What the first word of an error's type in pydantic says was expected."""


def read(cls: type[T], values: Any, problems: Problems, key: str = "") -> T:
    """Return the dataclass `cls` made from `values`; what is wrong goes into `problems`, and has its default here.

    Args:
        cls: whose fields and types are the schema; every field has a default.
        values: a mapping, as YAML gives it.
        problems: what was found wrong, in order.
        key: where `values` stands, for the messages; "" at the top.

    Raises:
        MissingDependencyError: pydantic is not installed.

    Example:
        >>> from hf_posswap.training.config.theirs import TrainingSettings
        >>> problems = Problems()
        >>> read(TrainingSettings, {"max_stepz": 3, "weight_decay": "much", "warmup_steps": 4}, problems).warmup_steps
        4.0
        >>> for problem in problems.said:
        ...     print(problem)
        max_stepz: no such key. Did you mean 'max_steps'?
        weight_decay: expected a number, got 'much'.
    """
    from pydantic import ValidationError

    held = [copy.deepcopy(values)]
    while True:
        try:
            made = _adapter(cls).validate_python(held)  # type: ignore[arg-type]
        except ValidationError as error:
            wrong = _by_place(error, held)
        else:
            wrong = {place: ["a number"] for place in _truths(held, made)}
            if not wrong:
                return made[0]
        for place, expected in sorted(wrong.items(), key=lambda item: _order(held, item[0])):
            _tell(cls, held, place, expected, problems, key)
        for place in wrong:
            _drop(held, place)


@cache
def _adapter(cls: type) -> Any:
    try:
        from pydantic import ConfigDict, TypeAdapter
    except ImportError as error:
        raise MissingDependencyError("pydantic", "train") from error
    config = ConfigDict(extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
    return TypeAdapter(list[cls], config=config)  # type: ignore[valid-type]  # a dataclass alone takes no config


def _by_place(error: Any, held: Any) -> dict[Place, list[str]]:
    """Return what was expected at each place, alternatives of a union together; of an unknown key nothing."""
    found: dict[Place, list[str]] = {}
    for each in error.errors(include_url=False):
        place, value = _within(held, each["loc"])
        if each["type"] == _UNKNOWN:
            found[place] = []
        elif value is None and each["type"].startswith("dataclass"):
            found[place] = ["nothing"]
        else:
            found.setdefault(place, []).append(_expected(each))
    return found


def _within(held: Any, location: Place) -> tuple[Place, Any]:
    """Return the part of `location` that lies in `held`, without what pydantic calls the members of a union."""
    place: Place = ()
    for part in location:
        inside = isinstance(held, Mapping) and part in held
        if not inside and not (isinstance(held, list | tuple) and isinstance(part, int) and part < len(held)):
            break
        place, held = (*place, part), held[part]
    return place, held


def _expected(error: Any) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "literal_error":
        return str(context["expected"]).replace("'", "")
    if kind == "value_error":
        return f"!{context['error']}"
    return _WORDS.get(kind.partition("_")[0], error["msg"].removeprefix("Input should be "))


def _truths(held: Any, made: Any) -> Iterator[Place]:
    """Yield where true or false was taken for a number, as Python does, and pydantic with it."""
    if isinstance(held, bool) and not isinstance(made, bool) and isinstance(made, int | float):
        yield ()
    elif isinstance(held, Mapping):
        for name, value in held.items():
            below = made.get(name) if isinstance(made, Mapping) else getattr(made, str(name), None)
            yield from ((name, *place) for place in _truths(value, below))
    elif isinstance(held, list | tuple) and isinstance(made, list | tuple):
        for number, (value, below) in enumerate(zip(held, made, strict=False)):
            yield from ((number, *place) for place in _truths(value, below))


def _order(held: Any, place: Place) -> list[int]:
    """Return where `place` stands in the file."""
    order = []
    for part in place:
        order.append(list(held).index(part) if isinstance(held, Mapping) else int(part))
        held = held[part]
    return order


def _drop(held: Any, place: Place) -> None:
    """Take what stands at `place` out; of an item of a list what it is about, and of everything all."""
    if len(place) == 1:
        held[0] = {}
        return
    _, above = _within(held, place[:-1])
    if isinstance(above, list):
        above[place[-1]] = _blank(above[place[-1]])  # type: ignore[index]
        if above[place[-1]] is None:  # type: ignore[index]
            _drop(held, place[:-1])
    elif isinstance(above, dict):
        above.pop(place[-1], None)


def _blank(value: Any) -> Any:
    """Return an item of a list without what it says; None where it can say nothing else."""
    return {} if isinstance(value, Mapping) and value else None


def named(place: Place, key: str = "") -> str:
    """Return a place as messages have it.

    Example:
        >>> named(("stages", 0, "max_steps"))
        'stages[0].max_steps'
    """
    parts = "".join(f"[{part}]" if isinstance(part, int) else f".{printable(part, 100)}" for part in place)
    return f"{key}{parts}".removeprefix(".")


def _tell(cls: Any, held: Any, place: Place, expected: list[str], problems: Problems, key: str) -> None:
    where, (_, value) = named(place[1:], key), _within(held, place)
    if not expected:
        _unknown(cls, place[1:], value, problems, key)
    elif expected[0].startswith("!"):
        problems.add(where, expected[0][1:])
    elif expected[0] != "nothing":
        near = difflib.get_close_matches(value, _choices(expected), n=1) if isinstance(value, str) else []
        hint = f" Did you mean {near[0]!r}?" if near else ""
        problems.add(where, f"expected {' or '.join(dict.fromkeys(expected))}, got {brief_repr(value)}.{hint}")


def _choices(expected: list[str]) -> list[str]:
    return [choice for said in expected for choice in re.split(r", | or ", said)]


def _unknown(cls: Any, place: Place, value: Any, problems: Problems, key: str) -> None:
    """Say what a key that is none was meant to be: what took its place, or one that is written alike."""
    where, name = named(place, key), str(place[-1])
    if where in SECTIONS and isinstance(value, Mapping) and value:
        for below in value:
            _unknown(cls, (*place, below), None, problems, key)
        return
    old = OLD.get(re.sub(r"\[\d+\]", "[]", where))
    if old is not None:
        new = re.sub(r"\[\]", next(iter(re.findall(r"\[\d+\]", where)), ""), old[0])
        problems.add(where, f"no such key; {old[1]} {new}.", doubts=new)
        return
    above = named(place[:-1], key)
    if above in SECTIONS:
        problems.add(where, f"no such key; {above} is {SECTIONS[above]} now.", doubts=SECTIONS[above])
        return
    known = _fields_at(cls, place[:-1])
    near = difflib.get_close_matches(name, known, n=1)
    told = known if len(known) <= 24 else [*known[:12], "... (posswap train --keys)"]
    hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(told)}."
    if "=" in name:
        hint = 'Inside braces a comma ends a value: put a text with commas in quotes, "yarn:factor=4,base=500000".'
    problems.add(where, f"no such key. {hint}", doubts=named((*place[:-1], near[0]), key) if near else where)


def _fields_at(cls: Any, place: Place) -> list[str]:
    """Return the fields of the dataclass that stands at `place` below `cls`."""
    import dataclasses
    from typing import get_args, get_type_hints

    for part in place:
        if isinstance(part, str):
            kind = get_type_hints(cls)[part]
            cls = next((item for item in (kind, *get_args(kind)) if dataclasses.is_dataclass(item)), kind)
    return [field.name for field in dataclasses.fields(cls) if field.init]
