"""HTML and SVG as values: everything that is not `Markup` is escaped."""

from __future__ import annotations

import html
import json

from hf_posswap.utils.printable import printable_lines

_VOID_HTML = frozenset({"meta", "link", "br", "input"})
_VOID = _VOID_HTML | {"circle", "line", "path", "rect"}


class Markup(str):
    """A string that is HTML or SVG markup."""

    __slots__ = ()


def tag(name: str, /, *content: object, **attributes: object) -> Markup:
    """Return an element; content and attributes are escaped unless they are `Markup`.

    Args:
        name: name of the element.
        content: text, numbers or `Markup`; None is skipped.
        attributes: `class_` means class, and other underscores are hyphens; None and False are skipped, True is an
            attribute without value.

    Example:
        >>> tag("p", "a < b", tag("b", "!"), class_="note", hidden=True)
        '<p class="note" hidden>a &lt; b<b>!</b></p>'
    """
    attribute_text = ""
    for key, value in attributes.items():
        attribute = key.rstrip("_").replace("_", "-")
        if value is not None and value is not False:
            attribute_text += f" {attribute}" if value is True else f' {attribute}="{join(value)}"'
    if name in _VOID:
        return Markup(f"<{name}{attribute_text}>" if name in _VOID_HTML else f"<{name}{attribute_text}/>")
    return Markup(f"<{name}{attribute_text}>{join(*content)}</{name}>")


def join(*content: object) -> Markup:
    """Concatenate the content, escaped unless it is `Markup`; None is skipped.

    Example:
        >>> join("a & b", None, Markup("<br>"))
        'a &amp; b<br>'
    """
    return Markup(
        "".join(
            item if isinstance(item, Markup) else html.escape(printable_lines(str(item)), quote=True)
            for item in content
            if item is not None
        )
    )


def json_script(value: object, identity: str) -> Markup:
    """Return a script element with `value` as JSON, in which no text can end the element.

    Example:
        >>> json_script({"name": "</script>"}, "data")
        '<script type="application/json" id="data">{"name": "\\\\u003c/script>"}</script>'
    """
    text = json.dumps(value, allow_nan=False).replace("<", "\\u003c")
    return tag("script", Markup(text), type="application/json", id=identity)
