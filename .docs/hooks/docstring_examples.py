"""Griffe knows a section "Examples:", whose doctests are code; the package's docstrings have one "Example:"."""

from __future__ import annotations

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Reads "Example:" as "Examples:"."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        """Change the heading in the docstring of `obj`."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
