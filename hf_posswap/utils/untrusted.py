"""Text and JSON from files that anyone may have written: regular files of a bounded size, values of a bounded depth.

A device such as /dev/zero has no end, a FIFO waits for a writer, and values a few thousand levels deep, or integers of
a few hundred digits, end in errors of Python wherever they are looked at. All of that is refused as it is read.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_BYTES = 2**26
"""Of a file that is read whole: several times the longest tokenizer.json or index of weights."""
MOST_LEVELS = 64
"""Of objects and lists inside one another: several times those of any config."""
MOST_DIGITS = 308
"""Of an integer: no longer one fits a float."""
_NOT_WAITING = getattr(os, "O_NONBLOCK", 0)


def read_bounded(path: Path, most: int = MOST_BYTES) -> str:
    """Return the text in the regular file `path`, as UTF-8.

    Args:
        path: a link may lead to the file.
        most: bytes that it may have.

    Raises:
        OSError: it is missing or unreadable, no regular file (a folder, a FIFO, a device), or longer.
        ValueError: it is not UTF-8, or `path` can be no path.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "a.txt"
        ...     _ = path.write_text("words")
        ...     read_bounded(path)
        'words'
        >>> read_bounded(Path("/dev/zero"))
        Traceback (most recent call last):
        OSError: it is no regular file
    """
    with open(path, "rb", opener=_open) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is no regular file")
        content = file.read(most + 1) if status.st_size <= most else b""
    if status.st_size > most or len(content) > most:
        raise OSError(f"it has more than {most} bytes")
    return content.decode("utf-8").replace("\r\n", "\n")


def _open(path: str, flags: int) -> int:
    """Open `path` without waiting for whoever writes to it, where it is a FIFO."""
    return os.open(path, flags | _NOT_WAITING)


def parse_json(text: str) -> Any:
    """Return the JSON value that `text` holds.

    Raises:
        ValueError: it is no JSON, deeper than `MOST_LEVELS`, or has an integer of more than `MOST_DIGITS` digits.

    Example:
        >>> parse_json('{"a": [1, 2]}')
        {'a': [1, 2]}
        >>> parse_json("[" * 9999 + "]" * 9999)
        Traceback (most recent call last):
        ValueError: objects and lists lie more than 64 levels inside one another
    """
    try:
        value = json.loads(text, parse_int=_integer)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    refuse_deep(value)
    return value


_TOO_DEEP = f"objects and lists lie more than {MOST_LEVELS} levels inside one another"


def refuse_deep(value: Any) -> None:
    """Raise a ValueError where dicts and lists lie more than `MOST_LEVELS` levels inside one another in `value`."""
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        level = [child for each in level if isinstance(each, dict | list) for child in _children(each)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _children(value: dict[str, Any] | list[Any]) -> list[Any]:
    children = value.values() if isinstance(value, dict) else value
    return [child for child in children if isinstance(child, dict | list)]


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > MOST_DIGITS:
        raise ValueError(f"it has an integer of {len(text.lstrip('-'))} digits")
    return int(text)


def read_bounded_json(path: Path, most: int = MOST_BYTES) -> Any:
    """Return the JSON value in the regular file `path`.

    Raises:
        OSError, ValueError: as `read_bounded` and `parse_json`.
    """
    return parse_json(read_bounded(path, most))
