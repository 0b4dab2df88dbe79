"""Checks of scheme parameters: one clear `SchemeError` each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hf_posswap.errors import SchemeError
from hf_posswap.utils.printable import brief_repr

LARGEST = 3.4028234e38
"""The largest float32: frequencies are float32, so no base may lie beyond it."""
LARGEST_SEED = 2**63 - 1


def number(
    owner: str,
    field: str,
    value: Any,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
) -> float:
    """Return `value` as a float if it is a finite number within the bounds.

    Raises:
        SchemeError: names the scheme, the field, the value and what was expected.
    """
    expected = "a finite number"
    if minimum is not None:
        expected += f" >= {minimum:g}"
    if above is not None:
        expected += f" > {above:g}"
    if maximum is not None:
        expected += f" and <= {maximum:g}"
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    # comparisons, unlike math.isfinite, take an int of any size; NaN fails them
    good = good and -sys.float_info.max <= value <= sys.float_info.max
    if good and minimum is not None:
        good = value >= minimum
    if good and above is not None:
        good = value > above
    if good and maximum is not None:
        good = value <= maximum
    if not good:
        raise SchemeError(f"{owner}: {field} must be {expected}, got {brief_repr(value)}.")
    return float(value)


def whole(owner: str, field: str, value: object, *, minimum: int, maximum: int) -> int:
    """Return `value` if it is a whole number within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise SchemeError(
            f"{owner}: {field} must be a whole number from {minimum} to {maximum}, got {brief_repr(value)}."
        )
    return value


def length(owner: str, field: str, value: object) -> int:
    """Return `value` if it is a positive whole number of tokens."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SchemeError(f"{owner}: {field} must be a whole number of tokens >= 1, got {brief_repr(value)}.")
    return value


def choice(owner: str, field: str, value: object, allowed: Sequence[str]) -> str:
    """Return `value` if it is one of `allowed`."""
    if value not in allowed:
        raise SchemeError(f"{owner}: {field} must be one of {', '.join(map(repr, allowed))}, got {brief_repr(value)}.")
    return str(value)


def factors(
    owner: str, field: str, value: object, *, zero: bool = False, each: str = "rotary pair"
) -> tuple[float, ...]:
    """Return `value` as a tuple of finite numbers > 0, or >= 0 where `zero` is allowed, one for `each`."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise SchemeError(f"{owner}: {field} must be a list of numbers, one a {each}, got {brief_repr(value)}.")
    bound = {"minimum": 0.0} if zero else {"above": 0.0}
    return tuple(number(owner, f"{field}[{i}]", item, **bound) for i, item in enumerate(value))


def flag(owner: str, field: str, value: object) -> bool:
    """Return `value` if it is True or False."""
    if not isinstance(value, bool):
        raise SchemeError(f"{owner}: {field} must be True or False, got {brief_repr(value)}.")
    return value
