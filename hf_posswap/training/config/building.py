"""From a mapping to frozen dataclasses, with every problem collected."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hf_posswap.errors import PosswapError
from hf_posswap.training.config.problems import Problems

T = TypeVar("T")
_WRONG = object()


def build(cls: type[T], values: Any, key: str, problems: Problems) -> T:
    """Return the dataclass `cls` made from `values`; what is wrong goes into `problems`, and has its default here.

    Args:
        cls: whose fields and types are the schema; every field has a default.
        values: a mapping, as YAML gives it; numbers that YAML takes for text, 2e-5, are numbers.
        key: where `values` stands, for the messages; "" at the top.
        problems: what was found wrong, in order.

    Example:
        >>> from hf_posswap.training.config.settings import OptimizerSettings
        >>> problems = Problems()
        >>> build(OptimizerSettings, {"stepz": 3, "clip": "much", "batch": 4}, "optimizer", problems).batch
        4
        >>> for problem in problems.said:
        ...     print(problem)
        optimizer.stepz: no such key. Did you mean 'steps'?
        optimizer.clip: expected a number, got 'much'.
    """
    if not isinstance(values, Mapping):
        problems.add(key, f"expected keys and values, got {values!r}.")
        return cls()
    hints = get_type_hints(cls)
    fields: list[str] = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    made = {}
    for name, value in values.items():
        where = _below(key, name)
        if name not in fields:
            _unknown(where, key, str(name), fields, problems)
            continue
        before = len(problems.said)
        converted = convert(value, hints[name], where, problems)
        if converted is not None or len(problems.said) == before:
            made[name] = converted
    try:
        return cls(**made)
    except (PosswapError, TypeError, ValueError) as error:
        problems.add(key, str(error))
        return cls()


def _below(key: str, name: Any) -> str:
    return f"{key}.{name}" if key else str(name)


def _unknown(where: str, above: str, name: str, known: list[str], problems: Problems) -> None:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
    problems.add(where, f"no such key. {hint}", doubts=_below(above, near[0]) if near else where)


def convert(value: Any, kind: Any, key: str, problems: Problems) -> Any:
    """Return `value` as a `kind`; None, and a note in `problems` of what was expected, where it is none."""
    if dataclasses.is_dataclass(kind):
        return build(kind, {} if value is None else value, key, problems)  # type: ignore[arg-type]
    if get_origin(kind) in (tuple, list) and isinstance(value, list | tuple):
        items = get_args(kind)
        if get_origin(kind) is list or items[-1] is Ellipsis:
            made = [convert(item, items[0], f"{key}[{n}]", problems) for n, item in enumerate(value)]
            return get_origin(kind)(made)
        if len(items) == len(value):
            pairs = zip(value, items, strict=True)
            return tuple(convert(item, kind, f"{key}[{n}]", problems) for n, (item, kind) in enumerate(pairs))
    if get_origin(kind) in (Union, types.UnionType):
        return _member(value, kind, key, problems)
    made = _plain(value, kind)
    if made is _WRONG:
        problems.add(key, f"expected {describe(kind)}, got {value!r}.")
        return None
    return made


def _member(value: Any, kind: Any, key: str, problems: Problems) -> Any:
    """Return `value` as the first member of a union that takes it, exact types before converted ones."""
    for member in sorted(get_args(kind), key=lambda m: type(value) is not m):
        tried = Problems()
        made = convert(value, member, key, tried)
        if not tried.said:
            return made
    problems.add(key, f"expected {describe(kind)}, got {value!r}.")
    return None


def _plain(value: Any, kind: Any) -> Any:
    """Return `value` as the plain type `kind`, or _WRONG."""
    if kind is Any:
        return value
    if kind is Path:
        return Path(value).expanduser() if isinstance(value, str) else _WRONG
    if get_origin(kind) is Literal:
        return value if value in get_args(kind) and not isinstance(value, bool) else _WRONG
    if kind in (None, type(None)):
        return None if value is None or value == "none" else _WRONG
    if kind is float:
        return _number(value)
    if kind is int:
        number = _number(value)
        return int(number) if number is not _WRONG and float(number).is_integer() else _WRONG
    origin = get_origin(kind) or kind
    if isinstance(origin, type):
        right = isinstance(value, origin) and (origin is bool or not isinstance(value, bool))
        return value if right else _WRONG
    return _WRONG


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return _WRONG
    try:
        number = float(value)
    except ValueError:
        return _WRONG
    return number if math.isfinite(number) else _WRONG


def describe(kind: Any) -> str:
    """Return what `kind` expects, in words.

    Example:
        >>> describe(int | None), describe(Literal["a", "b"]), describe(tuple[str, ...])
        ('a whole number or none', 'a or b', 'a list, each text')
    """
    if get_origin(kind) in (Union, types.UnionType):
        members = sorted(get_args(kind), key=lambda member: member is type(None))
        return " or ".join(describe(member) for member in members)
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if get_origin(kind) in (tuple, list):
        return f"a list, each {describe(get_args(kind)[0])}"
    if dataclasses.is_dataclass(kind) or get_origin(kind) in (dict, Mapping) or kind in (dict, Mapping):
        return "keys and values"
    known = {
        float: "a number",
        int: "a whole number",
        bool: "true or false",
        str: "text",
        Path: "a path",
        type(None): "none",
    }
    return known.get(kind, getattr(kind, "__name__", str(kind)))
