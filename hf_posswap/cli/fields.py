"""The fields of a scheme on the command line: read from its dataclass and docstring, where they are documented once."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_NONE = "none"
_TRUTH = {"true": True, "false": False}


def parse_value(text: str, kind: Any) -> Any:
    """Return the value of type `kind` that `text` writes.

    Args:
        text: as given on the command line.
        kind: the declared type of a scheme's field: a number, bool, str, Literal, tuple or list of them, None, another
            scheme (its name, or JSON), layers with schemes (JSON), or a union of these, whose first member that takes
            the text wins (str is asked last).

    Raises:
        ValueError: `text` is no such value.

    Example:
        >>> parse_value("1,2.5", tuple[float, ...]), parse_value("none", float | None)
        ((1.0, 2.5), None)
    """
    if get_origin(kind) in (Union, types.UnionType):
        return _first(text, sorted(get_args(kind), key=lambda member: (member is str, member is not type(None))))
    if get_origin(kind) is Literal:
        return {str(value): value for value in get_args(kind)}[text] if text in map(str, get_args(kind)) else _no(text)
    if _is_scheme(kind) or _is_layers(kind):
        return _json(text) if text.lstrip().startswith("{") else text if _is_scheme(kind) else _no(text)
    if get_origin(kind) in (tuple, list):
        return get_origin(kind)(parse_value(part.strip(), get_args(kind)[0]) for part in text.split(","))
    if kind is type(None):
        return None if text.lower() == _NONE else _no(text)
    if kind is bool:
        return _TRUTH[text.lower()] if text.lower() in _TRUTH else _no(text)
    if kind in (int, float, str):
        return kind(text)
    return _no(text)


def _first(text: str, kinds: list[Any]) -> Any:
    for kind in kinds:
        try:
            return parse_value(text, kind)
        except ValueError:
            continue
    return _no(text)


def _is_scheme(kind: Any) -> bool:
    return inspect.isclass(kind) and hasattr(kind, "to_dict")


def _is_layers(kind: Any) -> bool:
    """Return whether `kind` pairs layers with schemes."""
    return get_origin(kind) is tuple and any(map(_is_scheme, get_args(get_args(kind)[0])))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return _no(text)


def _no(text: str) -> Any:
    raise ValueError(text)


def describe_type(kind: Any) -> str:
    """Return what `kind` expects, in words.

    Example:
        >>> describe_type(float | None), describe_type(Literal["half", "interleaved"])
        ('a number or none', 'half or interleaved')
    """
    if get_origin(kind) in (Union, types.UnionType):
        members = sorted(get_args(kind), key=lambda member: member is type(None))
        return " or ".join(describe_type(member) for member in members)
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if _is_scheme(kind):
        return 'a scheme, by name or as JSON: {"name": "yarn", "factor": 4}'
    if _is_layers(kind):
        return 'layers and their schemes as JSON: {"0": "nope"}'
    if get_origin(kind) in (tuple, list):
        return f"a list, with commas, each {describe_type(get_args(kind)[0])}"
    known = {float: "a number", int: "a whole number", bool: "true or false", str: "text", type(None): _NONE}
    return known.get(kind, f"{getattr(kind, '__name__', kind)} (not settable on the command line)")


def format_value(value: Any) -> str:
    """Return `value` as it would be given on the command line.

    Example:
        >>> format_value((1.0, 2.5)), format_value(None), format_value(True)
        ('1,2.5', 'none', 'true')
    """
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, tuple | list):
        return ",".join(map(format_value, value))
    if isinstance(value, float):
        return f"{value:.17g}" if float(f"{value:g}") != value else f"{value:g}"
    return str(value).lower() if isinstance(value, bool | None) else str(value)


def field_kinds(cls: type) -> dict[str, Any]:
    """Return the declared type of every field of the dataclass `cls`, by name, in order."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def describe_fields(cls: type) -> list[dict[str, Any]]:
    """Return for each field of the dataclass `cls`: name, type in words, default, whether required, and its meaning."""
    documented = attribute_docs(cls)
    out = []
    for field, kind in zip(dataclasses.fields(cls), field_kinds(cls).values(), strict=True):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        default = None if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        out.append(
            {
                "name": field.name,
                "type": describe_type(kind),
                "default": _plain(default, kind),
                "required": required,
                "meaning": documented.get(field.name, ""),
            }
        )
    return out


def _plain(default: Any, kind: Any) -> Any:
    """Return a field's default as JSON has it."""
    if _is_layers(kind):
        return {str(layer): scheme.to_dict() for layer, scheme in default}
    if _is_scheme(kind):
        return default.name if default == type(default)() else default.to_dict()
    return list(default) if isinstance(default, tuple) else default


def attribute_docs(cls: type) -> dict[str, str]:
    """Return what the "Attributes:" sections of the docstrings of `cls` and its bases say, by name.

    Example:
        >>> class Scheme:
        ...     '''A scheme.
        ...
        ...     Attributes:
        ...         factor: how far it
        ...             stretches.
        ...     '''
        >>> attribute_docs(Scheme)
        {'factor': 'how far it stretches.'}
    """
    out: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base is not object and base.__dict__.get("__doc__"):
            out |= _entries(_section(inspect.cleandoc(base.__dict__["__doc__"]), "Attributes"))
    return out


def description(cls: type) -> str:
    """Return the docstring of `cls` before its first section."""
    before, *_ = re.split(r"(?m)^(?:Attributes|Args|Examples?|Raises|Returns):\s*$", inspect.getdoc(cls) or "")
    return before.strip()


def _section(doc: str, name: str) -> str:
    """Return the indented lines under `name:` in a cleaned docstring."""
    found = re.search(rf"(?m)^{name}:\s*\n((?:[ \t]+.*\n?|\s*\n)*)", doc + "\n")
    return inspect.cleandoc("\n" + found.group(1)) if found else ""


def _entries(section: str) -> dict[str, str]:
    """Return the entries "name: text" of a section; further lines of a text are indented."""
    out: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        start = re.match(r"(\w+)(?: \([^)]*\))?:\s*(.*)", line)
        if start:
            name, out[start.group(1)] = start.group(1), start.group(2)
        elif name and line.strip():
            out[name] = f"{out[name]} {line.strip()}"
    return out
