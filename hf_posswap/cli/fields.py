"""The fields of a scheme on the command line, read from its dataclass and docstring."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from hf_posswap.utils.scheme_text import attribute_docs, describe_type, field_kinds, is_layers, is_scheme


def format_value(value: Any) -> str:
    """Format `value` as it is written on the command line.

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
    """Return for each field of the dataclass `cls`: name, type, default, whether it is required, and meaning."""
    documented = attribute_docs(cls)
    out = []
    for field, annotation in zip(dataclasses.fields(cls), field_kinds(cls).values(), strict=True):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        default = None if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        out.append(
            {
                "name": field.name,
                "type": describe_type(annotation),
                "default": _plain(default, annotation),
                "required": required,
                "meaning": documented.get(field.name, ""),
            }
        )
    return out


def _plain(default: Any, annotation: Any) -> Any:
    """Return a field's default as JSON data."""
    if is_layers(annotation):
        return {str(layer): scheme.to_dict() for layer, scheme in default}
    if is_scheme(annotation):
        return _scheme(default)
    if isinstance(default, tuple):
        return [_scheme(item) if hasattr(item, "to_dict") else item for item in default]
    return default


def _scheme(default: Any) -> Any:
    """Return a scheme as JSON data: its name, where all its fields are as they begin."""
    return default.name if default == type(default)() else default.to_dict()
