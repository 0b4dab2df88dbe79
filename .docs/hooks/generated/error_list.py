"""Every error and warning of the package, from hf_posswap/errors.py: what it means, and the exit code it gives."""

from __future__ import annotations

import inspect

from generated.markup import prose, table
from hf_posswap import errors
from hf_posswap.cli.outcome import _CODES, Code


def classes() -> list[type[BaseException]]:
    """Return the errors and warnings that hf_posswap/errors.py defines, in its order."""
    public = [value for name, value in vars(errors).items() if not name.startswith("_")]
    found = [value for value in public if isinstance(value, type) and issubclass(value, BaseException)]
    return [value for value in found if value.__module__ == errors.__name__]


def render() -> str:
    """Return a table of errors and one of warnings."""
    out = []
    for base, head in ((Exception, "error"), (Warning, "warning")):
        chosen = [one for one in classes() if issubclass(one, Warning) == (base is Warning)]
        rows = [[f"[`{one.__name__}`](#{one.__name__.lower()})", _also(one), _doc(one), _code(one)] for one in chosen]
        columns = [head, "is also", "meaning", "exit code"]
        out.append(table(columns, rows) if head == "error" else table(columns[:3], [row[:3] for row in rows]))
    return "\n\n".join(out)


def _doc(one: type) -> str:
    return prose(inspect.getdoc(one) or "")


def _also(one: type[BaseException]) -> str:
    builtin = next(base for base in one.__mro__ if base.__module__ == "builtins")
    return f"`{builtin.__name__}`"


def _code(one: type[BaseException]) -> str:
    return str(next((code for code, kinds in _CODES if issubclass(one, kinds)), Code.OTHER).value)
