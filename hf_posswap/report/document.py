"""The HTML document around every page: it loads nothing from elsewhere, and is light or dark as the reader prefers."""

from __future__ import annotations

from hf_posswap.report.looks import style_sheet
from hf_posswap.report.markup import Markup, tag

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""What a page may load: nothing that is not in it."""


def document(title: str, *body: Markup, style: Markup | None = None) -> str:
    """Return the document.

    Args:
        title: of the page.
        body: what it holds, its scripts among it.
        style: beside the style sheet of every page.

    Example:
        >>> document("A page", tag("p", "It says so."))[:33]
        '<!doctype html>\\n<html lang="en"><'
    """
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"{title}: hf_posswap"),
        tag("style", style_sheet(), style),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', *body), lang='en')}\n"
