"""A scheme that a recipe writes as a text, as the mapping of its fields, so that others can be put in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_posswap.errors import OptionError
from hf_posswap.schemes import SCHEMES
from hf_posswap.utils.scheme_text import scheme_and_fields

JSON = ".json"
"""How a text ends that names a file with a scheme."""


def takes_fields(scheme: Any) -> bool:
    """Return whether `scheme` is a text that fields can be put into: no file.

    Example:
        >>> takes_fields("yarn:factor=4"), takes_fields("longrope.json"), takes_fields({"name": "yarn"})
        (True, False, False)
    """
    return isinstance(scheme, str) and not scheme.endswith(JSON)


def scheme_mapping(scheme: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return `scheme` as {name: ..., FIELD: VALUE}; a text that is none has itself as its name, to be refused by it.

    Args:
        scheme: a name, a name with fields ("yarn:factor=4"), a mapping, which is returned as it is, or None: {}.

    Example:
        >>> scheme_mapping("yarn:factor=4,base=500000"), scheme_mapping("rope"), scheme_mapping("rope(base=3)")
        ({'name': 'yarn', 'factor': 4.0, 'base': 500000.0}, {'name': 'rope'}, {'name': 'rope(base=3)'})
    """
    if not isinstance(scheme, str):
        return {} if scheme is None else scheme
    try:
        found = scheme_and_fields(scheme, dict(SCHEMES.items()))
    except OptionError:
        found = None
    return {"name": scheme} if found is None else {"name": found[0], **found[1]}
