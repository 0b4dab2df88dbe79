"""Numbers, names and values as people read and write them, in results, tables and files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from hf_posswap.errors import OptionError
from hf_posswap.utils.printable import printable_lines

_MARKS = re.compile(r"[\\`*|\[\]]|(?<!\w)_|_(?!\w)")


def brief(value: object) -> str:
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


def is_number(value: object) -> TypeGuard[float]:
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


def public_name(path: str | Path) -> str:
    """Return `path` as files that are passed on may show it: of an absolute one, which may name a user, its last part.

    Example:
        >>> public_name("/place/of/me/books/emma.txt"), public_name("books/emma.txt"), public_name("~/books")
        ('emma.txt', 'books/emma.txt', 'books')
    """
    named = Path(path)
    hidden = named.is_absolute() or str(path).startswith("~") or ":\\" in str(path)
    return (re.split(r"[\\/]", str(named))[-1] or str(named)) if hidden else str(path)


def with_older_name(**values: object) -> Any:
    """Return the value of an argument that has two names, the older one last; None: it was not passed.

    Raises:
        OptionError: it was passed under both names.

    Example:
        >>> with_older_name(max_length=None, length=512)
        512
    """
    passed = [value for value in values.values() if value is not None]
    if len(passed) > 1:
        raise OptionError(f"{' and '.join(values)} are two names of one argument: give {next(iter(values))} alone.")
    return passed[0] if passed else None


def markdown_text(text: str) -> str:
    """Return `text` so that Markdown shows it as it is, in a table's cell too: one line, and nothing in it is markup.

    Example:
        >>> markdown_text("a|b <img> *c*\\n_d e_f")
        'a\\\\|b &lt;img&gt; \\\\*c\\\\* \\\\_d e_f'
    """
    escaped = _MARKS.sub(lambda mark: f"\\{mark[0]}", " ".join(printable_lines(text).split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
