"""The fields of a scheme on the command line: read from its dataclass and docstring, where they are documented once."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from typing import Any

from hf_posswap.utils.scheme_text import describe_type, field_kinds, is_layers, is_scheme


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
    if is_layers(kind):
        return {str(layer): scheme.to_dict() for layer, scheme in default}
    if is_scheme(kind):
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
