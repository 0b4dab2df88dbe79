"""Names of files and of what users call things, as results and tables show them."""

from __future__ import annotations

import re
from pathlib import Path

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


def markdown_text(text: str) -> str:
    """Return `text` so that Markdown shows it as it is, in a table's cell too: one line, and nothing in it is markup.

    Example:
        >>> markdown_text("a|b <img> *c*\\n_d e_f")
        'a\\\\|b &lt;img&gt; \\\\*c\\\\* \\\\_d e_f'
    """
    escaped = _MARKS.sub(lambda mark: f"\\{mark[0]}", " ".join(printable_lines(text).split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
