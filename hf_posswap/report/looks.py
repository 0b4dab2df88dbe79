"""The style of each model on the page: `hf_posswap.plotting.styles` as CSS classes, SVG marks and a style sheet."""

from __future__ import annotations

from importlib.resources import files

from hf_posswap.plotting.styles import SLIDING, STYLES, stroke_of, style_of
from hf_posswap.report.markup import Markup, tag

_DASH = "M-6,0H6"


def look(number: int) -> str:
    """Return the CSS classes of the `number`-th model.

    Example:
        >>> look(1), look(9), look(17), look(SLIDING)
        ('c1', 'c1 dashed', 'c1 dotted', 'ref')
    """
    if number == SLIDING:
        return "ref"
    return f"c{number % len(STYLES)} {stroke_of(number)}".removesuffix(" solid")


def shape(number: int) -> str:
    """Return the mark of the `number`-th model as SVG path data around (0, 0)."""
    return _DASH if number == SLIDING else style_of(number).path


def mark(number: int) -> Markup:
    """Return the mark of the `number`-th model, to be put before its name.

    Example:
        >>> mark(0).startswith('<svg class="mark c0" viewBox="-6 -6 12 12" aria-hidden="true"><path d="M')
        True
    """
    path = tag("path", d=shape(number))
    return tag("svg", path, class_=f"mark {look(number)}", viewBox="-6 -6 12 12", aria_hidden="true")


def colours() -> Markup:
    """Return the style sheet of the models' colours, for light and dark pages."""
    light = " ".join(f"--c{number}: {style.colour};" for number, style in enumerate(STYLES))
    dark = " ".join(f"--c{number}: {style.dark};" for number, style in enumerate(STYLES))
    classes = " ".join(f".c{number} {{ --c: var(--c{number}); }}" for number in range(len(STYLES)))
    on_dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    return Markup(f":root {{ {light} }}\n{on_dark}\n{classes}\n")


def style_sheet() -> Markup:
    """Return the style sheet of every page: the models' colours, and the layout."""
    return Markup(colours() + files("hf_posswap.report").joinpath("page.css").read_text(encoding="utf-8"))
