"""The HTML document around every page. It loads no external resources, and follows the light or dark preference."""

from __future__ import annotations

from hf_posswap.report.looks import style_sheet
from hf_posswap.report.markup import Markup, tag

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""The content security policy: a page loads no external resources."""


def document(title: str, *body: Markup, style: Markup | None = None) -> str:
    """Return the document.

    Args:
        title: title of the page.
        body: content of the body, including scripts.
        style: further styles, in addition to the common style sheet.

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
