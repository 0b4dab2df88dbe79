"""Text that came from users and files, as terminals, logs and pages may show it."""

from __future__ import annotations

import re
from collections.abc import Iterable

UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""Control characters but for tabs and line feeds, marks that change the direction of text, halves of a character."""
_BREAKS = re.compile(r"\s*[\n\r]\s*")


def printable_lines(text: str) -> str:
    r"""Return `text` with characters escaped that control a terminal or change what is shown.

    Line feeds and tabs stay.

    Example:
        >>> print(printable_lines("a\x1b[31m\u202eb\nc"))
        a\x1b[31m\u202eb
        c
    """
    return UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text.replace("\r\n", "\n"))


def printable(text: object, most: int | None = None) -> str:
    r"""Return `text` as `printable_lines` does, in one line: of a line break a space is left.

    Args:
        text: a path, a name, a message.
        most: characters of it; what is longer ends with an ellipsis.

    Example:
        >>> print(printable("my\nmodel\x07"), printable("a" * 9, most=3))
        my model\x07 aaa...
    """
    line = printable_lines(_BREAKS.sub(" ", str(text)))
    return line if most is None or len(line) <= most else f"{line[:most]}..."


def in_lines(lines: Iterable[str]) -> str:
    r"""Return `lines` as one text; line breaks inside a line become spaces.

    Example:
        >>> print(in_lines(["model  a\nb", "length 8"]))
        model  a b
        length 8
    """
    return "\n".join(map(printable, lines))


def brief_repr(value: object, most: int = 200) -> str:
    """Return the repr of a value that was given, for a message: of one that is too long, its beginning and its length.

    Example:
        >>> brief_repr("yarn"), brief_repr("a" * 99, most=5)
        ("'yarn'", "'aaaa... (101 characters)")
    """
    text = printable_lines(repr(value))
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
