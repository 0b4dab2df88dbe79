"""HTML and SVG as values: whatever is not markup already is escaped, so no text can become markup."""

from __future__ import annotations

import html
import json
from typing import Any

from hf_posswap.utils.printable import printable_lines

_VOID = frozenset({"meta", "link", "br", "circle", "line", "path", "rect"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *content: object, **attributes: object) -> Markup:
    """Return an element; content and attributes are escaped unless they are `Markup`.

    Args:
        name: of the element.
        content: text, numbers or `Markup`; None is left out.
        attributes: `class_` means class, and other underscores are hyphens; None and False are left out, True stands
            alone.

    Example:
        >>> tag("p", "a < b", tag("b", "!"), class_="note", hidden=True)
        '<p class="note" hidden>a &lt; b<b>!</b></p>'
    """
    said = "".join(
        _attribute(key, value) for key, value in attributes.items() if value is not None and value is not False
    )
    if name in _VOID:
        return Markup(f"<{name}{said}>" if name in ("meta", "link", "br") else f"<{name}{said}/>")
    return Markup(f"<{name}{said}>{join(*content)}</{name}>")


def join(*content: object) -> Markup:
    """Return the pieces one after the other, escaped unless they are `Markup`; None is left out.

    Example:
        >>> join("a & b", None, Markup("<br>"))
        'a &amp; b<br>'
    """
    pieces = (piece for piece in content if piece is not None)
    return Markup("".join(p if isinstance(p, Markup) else _escaped(p) for p in pieces))


def _escaped(piece: object) -> str:
    return html.escape(printable_lines(str(piece)), quote=True)


def json_script(value: Any, identity: str) -> Markup:
    """Return a script element that holds `value` as JSON and that no text in it can end.

    Example:
        >>> json_script({"name": "</script>"}, "data")
        '<script type="application/json" id="data">{"name": "\\\\u003c/script>"}</script>'
    """
    text = json.dumps(value, allow_nan=False).replace("<", "\\u003c")
    return tag("script", Markup(text), type="application/json", id=identity)


def _attribute(key: str, value: object) -> str:
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{join(value)}"'
