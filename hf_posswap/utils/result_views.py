"""How results show themselves: a short repr, and in a notebook a small table of their own values."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping
from pathlib import Path

from hf_posswap.utils import html_tables
from hf_posswap.utils.printable import printable

MOST_LETTERS = 390
"""Maximum length of a repr."""
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 60, 60
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = _SHORT.maxfrozenset = 4
_MOST_IN_A_CELL = 1000


class ResultView:
    """Mixin for a result that is a dataclass with `repr=False`: the repr is short, and a notebook shows a table.

    A subclass overrides `_repr_facts` to choose what its repr shows, and `_html_rows` for the table.
    """

    def _repr_facts(self) -> Mapping[str, object]:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {field.name: getattr(self, field.name) for field in fields}

    def _html_rows(self) -> list[tuple[str, str]]:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        values = {field.name: getattr(self, field.name) for field in fields}
        return [(name, printable(value if isinstance(value, str) else brief(value))) for name, value in values.items()]

    def __repr__(self) -> str:
        return short_repr(self, self._repr_facts())

    def _repr_html_(self) -> str:
        rows = [(name, printable(value, _MOST_IN_A_CELL)) for name, value in self._html_rows()]
        return html_tables.together([html_tables.title(type(self).__name__), html_tables.table(rows)])


class FactsView(ResultView):
    """Mixin whose table shows the facts of its repr."""

    def _html_rows(self) -> list[tuple[str, str]]:
        return [(name, str(value)) for name, value in self._repr_facts().items()]


def short_repr(result: object, facts: Mapping[str, object]) -> str:
    """Return the class of `result` with `facts` as keyword arguments, at most `MOST_LETTERS` characters.

    Example:
        >>> short_repr(Path(), {"name": "a", "rows": [1] * 9})
        "PosixPath(name='a', rows=[1, 1, 1, 1, ...])"
    """
    start, end = f"{type(result).__name__}(", ")"
    shown: list[str] = []
    for name, value in facts.items():
        fact = f"{name}={brief(value)}"
        if len(start) + len(", ".join([*shown, fact])) + len(", ...)") > MOST_LETTERS:
            end = f"{', ' if shown else ''}...)"
            break
        shown.append(fact)
    return f"{start}{', '.join(shown)}{end}"


def brief(value: object) -> str:
    """Return a short repr of a value: of an array or a tensor its dtype and shape, of a long list its beginning.

    Example:
        >>> import torch
        >>> brief(torch.zeros(2, 3)), brief(0.123456789), brief(Path("a"))
        ('float32[2, 3]', '0.123457', "'a'")
    """
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(shape)}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return printable(_SHORT.repr(str(value) if isinstance(value, Path) else value))
