"""Numbers and values as people read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard


def brief(value: Any) -> str:
    """Return a value as a plan shows it: numbers short, long lists by their length.

    Example:
        >>> brief({"rope_theta": 500000.0, "long_factor": [1.0] * 8})
        'rope_theta=500000, long_factor=[8 numbers]'
    """
    if isinstance(value, dict):
        return ", ".join(f"{k}={brief(v)}" for k, v in value.items())
    if isinstance(value, list) and len(value) > 4:
        return f"[{len(value)} numbers]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def said_by(error: BaseException, most: int = 1000) -> str:
    """Return all that an error says, in one line; the name of its type where it says nothing.

    Args:
        error: of any library: many say the reason on a later line than the first.
        most: characters of it; what is longer ends with an ellipsis.

    Example:
        >>> said_by(ValueError("2 problems:\\n  no vocabulary\\n  no merges")), said_by(KeyError())
        ('2 problems: no vocabulary no merges', 'KeyError')
    """
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else f"{text[:most].rstrip()} ..."


def interval_text(interval: Mapping[str, Any], write: str | Callable[[float], str], between: str = " to ") -> str:
    """Return the interval of a result, or that there is none.

    Args:
        interval: with its ends as "low" and "high", None where no interval holds.
        write: the format of a number, or a function.
        between: the ends.

    Example:
        >>> interval_text({"low": -0.25, "high": 0.5}, "+.2f"), interval_text({"low": None, "high": None}, "+.2f")
        ('-0.25 to +0.50', 'no interval')
    """
    low, high = interval["low"], interval["high"]
    if low is None or high is None:
        return "no interval"
    low, high = (format(end, write) if isinstance(write, str) else write(end) for end in (low, high))
    return f"{low}{between}{high}"


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value of a file or a config is a finite number.

    Example:
        >>> is_number(2), is_number(True), is_number(float("nan")), is_number("2")
        (True, False, False, False)
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def human_bytes(count: float) -> str:
    """Return a number of bytes as people write it.

    Example:
        >>> human_bytes(1536)
        '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.4g} {unit}"
        count /= 1024
    raise AssertionError
