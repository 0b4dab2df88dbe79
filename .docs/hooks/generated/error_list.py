"""Every error and warning of the package, from hf_posswap/errors.py: what it means, and the exit code it gives."""

from __future__ import annotations

import inspect

from generated.markup import prose, table
from hf_posswap import errors
from hf_posswap.cli.outcome import _CODES, Code


def classes() -> list[type[BaseException]]:
    """Return the errors and warnings that hf_posswap/errors.py defines, in its order."""
    public = [value for name, value in vars(errors).items() if not name.startswith("_")]
    all_classes = [value for value in public if isinstance(value, type) and issubclass(value, BaseException)]
    return [value for value in all_classes if value.__module__ == errors.__name__]


def render() -> str:
    """Return a table of errors and one of warnings."""
    out = []
    for base, head in ((Exception, "error"), (Warning, "warning")):
        chosen = [cls for cls in classes() if issubclass(cls, Warning) == (base is Warning)]
        rows = [
            [
                f"[`{cls.__name__}`](#{cls.__name__.lower()})",
                _also(cls),
                _doc(cls),
                _code(cls),
            ]
            for cls in chosen
        ]
        columns = [head, "is also", "meaning", "exit code"]
        out.append(table(columns, rows) if head == "error" else table(columns[:3], [row[:3] for row in rows]))
    return "\n\n".join(out)


def _doc(cls: type) -> str:
    return prose(inspect.getdoc(cls) or "")


def _also(cls: type[BaseException]) -> str:
    builtin = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    return f"`{builtin.__name__}`"


def _code(cls: type[BaseException]) -> str:
    return str(next((code for code, known in _CODES if issubclass(cls, known)), Code.OTHER).value)
