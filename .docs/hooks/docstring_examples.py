"""Griffe knows a section "Examples:", whose doctests are code; the package's docstrings have one "Example:"."""

from __future__ import annotations

import inspect
from typing import Any

import griffe

from hf_posswap.schemes import SCHEMES

_SCHEMES = {f"{cls.__module__}.{cls.__qualname__}": cls for _, cls in SCHEMES.items()}


class Examples(griffe.Extension):
    """Reads "Example:" as "Examples:", and of schemes what `help()` says, the fields of their bases too."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        """Change the heading in the docstring of `obj`."""
        if obj.docstring is None:
            return
        if obj.path in _SCHEMES:
            obj.docstring.value = inspect.getdoc(_SCHEMES[obj.path])
        obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
