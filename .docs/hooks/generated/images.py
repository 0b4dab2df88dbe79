"""The table of image models: what each scheme becomes in their classes."""

from __future__ import annotations

from recipes.image_table import table


def render() -> str:
    """Return the table that `python recipes/image_table.py` prints."""
    return table()
