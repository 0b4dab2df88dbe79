"""The interactive page of schemes, as `posswap explain --html` writes it: the site has a copy."""

from __future__ import annotations

from hf_posswap.explorer.choices import CHOICES
from hf_posswap.explorer.page import render_page

PLACE = "explorer.html"
"""Of the page in the site."""


def page() -> str:
    """Return the page, HTML that needs no other file."""
    return render_page()


def render() -> str:
    """Return the words that lead there: a forge, which has no such page, shows none."""
    return (
        f"[**Play with positions**]({PLACE}): sliders for base, factor, window and heads redraw every picture of "
        f"{len(CHOICES)} schemes in the browser."
    )
