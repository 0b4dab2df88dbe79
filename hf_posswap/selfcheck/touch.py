"""Mapping from an error to the transformers code that a release changed."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator
from types import FrameType

from hf_posswap.errors import PosswapError

_TOUCHES = "Touches "
"""The start of the docstring paragraph that names a function's dependencies outside hf_posswap."""


class WrongAnswerError(Exception):
    """Two results differ that should be equal, or are equal and should differ."""


def words_of(error: Exception) -> str:
    """Return the message of an error in one line.

    Example:
        >>> words_of(AttributeError("no\\nsuch thing"))
        'AttributeError: no such thing'
    """
    text = " ".join(str(error).split())
    return text if isinstance(error, PosswapError | WrongAnswerError) else f"{type(error).__name__}: {text or '-'}"


def touch_of(error: Exception, otherwise: str) -> str:
    """Return where hf_posswap met an error, its dependencies there, and where transformers raised it.

    Args:
        error: the caught error.
        otherwise: the return value for errors of the self-check itself, such as different results.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    ours = [where for where in frames if _is_of(where[0], "hf_posswap") and not _is_of(where[0], __package__ or "")]
    if not ours:
        return otherwise
    lines = [_location(*ours[-1]), *_touched(ours[-1][0])]
    beyond = [where for where in frames[frames.index(ours[-1]) :] if _is_of(where[0], "transformers")]
    return "; ".join(lines + [f"raised in {_location(*where)}" for where in beyond[-1:]])


def _is_of(frame: FrameType, package: str) -> bool:
    name = frame.f_globals.get("__name__", "")
    return name == package or name.startswith(f"{package}.")


def _location(frame: FrameType, line: int) -> str:
    """Return module, function, line number and line of a frame."""
    code = frame.f_code
    text = linecache.getline(code.co_filename, line).strip()
    return f"{frame.f_globals['__name__']}.{code.co_qualname}, line {line}: {text}"


def _touched(frame: FrameType) -> Iterator[str]:
    """Yield the dependencies that the docstring of a frame's function names."""
    function = frame.f_globals.get(frame.f_code.co_name)
    for paragraph in (getattr(function, "__doc__", None) or "").split("\n\n"):
        if (sentence := " ".join(paragraph.split())).startswith(_TOUCHES):
            yield sentence[0].lower() + sentence[1:].split(". ")[0].rstrip(".")
