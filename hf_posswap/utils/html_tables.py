"""Small HTML tables for notebooks: self-contained, escaped, in the colours of whatever page they lie in."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape as escape_markup
from pathlib import Path

from hf_posswap.utils.printable import printable_lines

_CELL = "text-align:left;vertical-align:top;padding:2px 12px 2px 0"
_LINE = "border-bottom:1px solid currentColor"


def escape(text: str) -> str:
    """Return `text` so that a page shows it as it is."""
    return escape_markup(printable_lines(text))


def title(text: str) -> str:
    """Return `text` as what stands above tables.

    Example:
        >>> title("GPT2LMHeadModel: <rope>")
        '<p style="margin:4px 0"><strong>GPT2LMHeadModel: &lt;rope&gt;</strong></p>'
    """
    return f'<p style="margin:4px 0"><strong>{escape(text)}</strong></p>'


def paragraph(text: str) -> str:
    """Return `text` as a paragraph."""
    return f'<p style="margin:4px 0">{escape(text)}</p>'


def bullets(lines: Iterable[str]) -> str:
    """Return `lines` as a list; nothing where there are none."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul style="margin:4px 0">{items}</ul>' if items else ""


def table(rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Return `rows` as a table, whose first cells head the rows.

    Example:
        >>> table([["route", "native"]]).count("<td"), table([["a", "b"]], ["x", "y"]).count("<th")
        (1, 4)
    """
    head = "".join(f'<th scope="col" style="{_CELL};{_LINE}">{escape(name)}</th>' for name in header)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<table style="color:inherit;background:none;border-collapse:collapse">{top}<tbody>{body}</tbody></table>'


def picture(path: Path) -> str:
    """Return the PNG file `path` as an image inside the page; a sentence where it is not there any more."""
    try:
        data = base64.b64encode(path.read_bytes()).decode("ascii")
    except OSError:
        return paragraph(f"{path} is not there any more")
    return f'<img alt="{escape(path.name)}" style="max-width:100%" src="data:image/png;base64,{data}">'


def _cells(row: Sequence[str]) -> str:
    first, *others = map(escape, row)
    return f'<th scope="row" style="{_CELL}">{first}</th>' + "".join(f'<td style="{_CELL}">{c}</td>' for c in others)


def together(blocks: Iterable[str]) -> str:
    """Return `blocks` as one block, as wide as the page allows and no wider."""
    return f'<div style="overflow-x:auto">{"".join(blocks)}</div>'
