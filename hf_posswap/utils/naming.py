"""Names of files and of what users call things, as results and tables show them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hf_posswap.errors import OptionError
from hf_posswap.utils.printable import printable_lines

_MARKS = re.compile(r"[\\`*|\[\]]|(?<!\w)_|_(?!\w)")


def public_name(path: str | Path) -> str:
    """Return `path` as files that are passed on may show it: of an absolute one, which may name a user, its last part.

    Example:
        >>> public_name("/place/of/me/books/emma.txt"), public_name("books/emma.txt"), public_name("~/books")
        ('emma.txt', 'books/emma.txt', 'books')
    """
    named = Path(path)
    hidden = named.is_absolute() or str(path).startswith("~") or ":\\" in str(path)
    return (re.split(r"[\\/]", str(named))[-1] or str(named)) if hidden else str(path)


def with_older_name(**values: Any) -> Any:
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
