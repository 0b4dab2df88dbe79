"""From an error to what a release of transformers broke."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator
from types import FrameType

from hf_posswap.errors import PosswapError

_TOUCHES = "Touches "
"""How the docstring of a function says what it goes by outside of hf_posswap."""


class WrongAnswerError(Exception):
    """Two results differ that should be the same, or are the same and should differ."""


def words_of(error: Exception) -> str:
    """Return what an error says, in one line.

    Example:
        >>> words_of(AttributeError("no\\nsuch thing"))
        'AttributeError: no such thing'
    """
    text = " ".join(str(error).split())
    return text if isinstance(error, PosswapError | WrongAnswerError) else f"{type(error).__name__}: {text or '-'}"


def touch_of(error: Exception, otherwise: str) -> str:
    """Return where hf_posswap met an error, with what it touches there, and where in transformers it came from.

    Args:
        error: that was raised and caught.
        otherwise: what to return where the error came from the self-check itself: results that differ.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    ours = [where for where in frames if _is_of(where[0], "hf_posswap") and not _is_of(where[0], __package__ or "")]
    if not ours:
        return otherwise
    said = [_place(*ours[-1]), *_touched(ours[-1][0])]
    beyond = [where for where in frames[frames.index(ours[-1]) :] if _is_of(where[0], "transformers")]
    return "; ".join(said + [f"raised in {_place(*where)}" for where in beyond[-1:]])


def _is_of(frame: FrameType, package: str) -> bool:
    name = frame.f_globals.get("__name__", "")
    return name == package or name.startswith(f"{package}.")


def _place(frame: FrameType, line: int) -> str:
    """Return module, function, line number and line of a frame."""
    code = frame.f_code
    text = linecache.getline(code.co_filename, line).strip()
    return f"{frame.f_globals['__name__']}.{code.co_qualname}, line {line}: {text}"


def _touched(frame: FrameType) -> Iterator[str]:
    """Give what the function of a frame says that it touches."""
    function = frame.f_globals.get(frame.f_code.co_name)
    for paragraph in (getattr(function, "__doc__", None) or "").split("\n\n"):
        if (said := " ".join(paragraph.split())).startswith(_TOUCHES):
            yield said[0].lower() + said[1:].split(". ")[0].rstrip(".")
