"""The interactive page of schemes, as `posswap explain --html` writes it: the site has a copy."""

from __future__ import annotations

from hf_posswap.inspection.explorer.data import SHAPES
from hf_posswap.inspection.explorer.page import render_page
from hf_posswap.schemes.base import schemes_for

PLACE = "explorer.html"
"""Of the page in the site."""


def page() -> str:
    """Return the page, HTML that needs no other file."""
    return render_page()


def render() -> str:
    """Return the words that lead there: a forge, which has no such page, shows none."""
    shapes = ", ".join(shape.name for shape in SHAPES)
    return (
        f"[**Play with positions**]({PLACE}): a slider lengthens the text, and every picture of "
        f"{len(schemes_for('text'))} schemes follows, in the shapes of {shapes}."
    )
