"""Values of edits and plans as JSON, and back: numbers, text, tuples, schemes and geometries."""

from __future__ import annotations

import dataclasses
from typing import Any

from hf_posswap.geometry import Geometry
from hf_posswap.schemes.base import Scheme, make_scheme


def to_plain(value: Any) -> Any:
    """Return `value` as JSON.

    Example:
        >>> to_plain((1, "a"))
        {'$tuple': [1, 'a']}
    """
    if isinstance(value, Scheme):
        return {"$scheme": value.to_dict()}
    if isinstance(value, Geometry):
        return {"$geometry": to_plain(dataclasses.asdict(value))}
    if isinstance(value, tuple):
        return {"$tuple": [to_plain(item) for item in value]}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return value


def from_plain(value: Any) -> Any:
    """Return the value that `to_plain` encoded.

    Example:
        >>> from_plain({"$tuple": [1, "a"]})
        (1, 'a')
    """
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$scheme" in value:
        return make_scheme(value["$scheme"])
    if "$geometry" in value:
        return Geometry(**from_plain(value["$geometry"]))
    if "$tuple" in value:
        return tuple(from_plain(item) for item in value["$tuple"])
    return {key: from_plain(item) for key, item in value.items()}
