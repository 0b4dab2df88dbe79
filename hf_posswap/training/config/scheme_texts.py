"""Converts a scheme given as text into a mapping of its fields, so that others can be merged in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_posswap.errors import OptionError
from hf_posswap.schemes.base import known_schemes
from hf_posswap.utils.scheme_text import scheme_and_fields

JSON = ".json"
"""The suffix of a scheme that is a file."""


def takes_fields(scheme: Any) -> bool:
    """Return whether `scheme` is text that fields can be merged into, and not a file.

    Example:
        >>> takes_fields("yarn:factor=4"), takes_fields("longrope.json"), takes_fields({"name": "yarn"})
        (True, False, False)
    """
    return isinstance(scheme, str) and not scheme.endswith(JSON)


def scheme_mapping(scheme: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return `scheme` as {name: ..., FIELD: VALUE}; invalid text becomes the name, so that a later check refuses it.

    Args:
        scheme: a name, a name with fields ("yarn:factor=4"), a mapping, returned unchanged, or None: {}.

    Example:
        >>> scheme_mapping("yarn:factor=4,base=500000"), scheme_mapping("rope"), scheme_mapping("rope(base=3)")
        ({'name': 'yarn', 'factor': 4.0, 'base': 500000.0}, {'name': 'rope'}, {'name': 'rope(base=3)'})
    """
    if not isinstance(scheme, str):
        return {} if scheme is None else scheme
    try:
        parsed = scheme_and_fields(scheme, known_schemes())
    except OptionError:
        parsed = None
    return {"name": scheme} if parsed is None else {"name": parsed[0], **parsed[1]}
