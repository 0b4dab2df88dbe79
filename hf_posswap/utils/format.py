"""Numbers and values as people read them."""

from __future__ import annotations

from typing import Any


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
