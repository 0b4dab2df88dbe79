"""Every error of the package. A message says what was given, what was expected and what to do.

Each one subclasses `PosswapError` and the matching builtin, so `except ValueError` works as well.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from hf_posswap.utils.printable import brief_repr, printable, printable_lines


class PosswapError(Exception):
    """Base of every error that hf_posswap raises on purpose."""

    def __str__(self) -> str:  # KeyError would show the repr of its message
        return printable(self.args[0]) if self.args else ""


class UnknownNameError(PosswapError, KeyError):
    """An unknown name; the message suggests close matches and lists all names."""

    def __init__(self, kind: str, name: object, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        near = difflib.get_close_matches(str(name)[:200], self.known, n=3)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        super().__init__(f"unknown {kind} {brief_repr(name)}.{hint} Known: {', '.join(self.known) or 'none'}.")

    def __reduce__(self) -> tuple[type, tuple[str, object, list[str]]]:
        return type(self), (self.kind, self.name, self.known)


class DuplicateNameError(PosswapError, ValueError):
    """A name that a registry already holds for another item."""


class _PosswapWarning(UserWarning):
    """Base of every warning of the package."""

    def __str__(self) -> str:
        return printable(self.args[0]) if self.args else ""


class PluginWarning(_PosswapWarning):
    """An entry point of another package, which declares schemes or families, could not be loaded."""


class SchemeError(PosswapError, ValueError):
    """A scheme's parameter is impossible, alone or for this model."""


class OptionError(PosswapError, TypeError, ValueError):
    """An option that the scheme or the function does not have, or a value that it does not take."""


class UnsupportedModelError(PosswapError, ValueError):
    """No family describes this model, or the model has position parts that its family does not mention."""

    def __str__(self) -> str:  # one line each: what is missing, the closest match, what to do
        return printable_lines(self.args[0]) if self.args else ""


class UnsupportedSwapError(PosswapError, ValueError):
    """This scheme cannot be put into this model; the message says why and what would work."""


class NotPatchedError(PosswapError, ValueError):
    """An operation that needs a patched model was given one that is not."""


class AlreadyPatchedError(PosswapError, ValueError):
    """The model already carries a swap: undo it first."""


class ModelInUseError(PosswapError, RuntimeError):
    """Positions cannot be changed, or a forward not run: another thread, or an enclosing forward, uses the model."""


class SwapVerificationError(PosswapError, RuntimeError):
    """After patching, the proof that the mechanism changed as planned failed."""


class PositionCheckError(PosswapError, RuntimeError):
    """`check` found errors in the positions of a model; the message lists them, each with its fix."""

    def __str__(self) -> str:  # one line each
        return printable_lines(self.args[0]) if self.args else ""


class PositionRangeError(PosswapError, IndexError):
    """A position lies beyond the end of the model's position table."""


class PositionShapeError(PosswapError, ValueError):
    """The number of position ids differs from the number of tokens."""


class RecordError(PosswapError, ValueError):
    """A SwapRecord (`config.posswap`) that cannot be read or does not fit the model.

    Attributes:
        problem: the message without its advice.
        advice: what to do; "" where the message names nothing.
    """

    def __init__(self, problem: object = "", advice: str = "") -> None:
        self.problem, self.advice = str(problem), advice
        super().__init__(f"{problem} {advice}" if advice else problem)


class CheckpointError(PosswapError, OSError):
    """A folder or Hub id that is not a readable checkpoint, or cannot be written."""


class RemoteCodeError(CheckpointError):
    """The checkpoint contains custom Python code, which runs only with trust_remote_code=True."""

    def __init__(self, source: object, what: str = "cannot be read without running code that it brings") -> None:
        self.source, self.what = str(source), what
        super().__init__(
            f"{self.source!r} {what}, and code is run only where that is asked for. Read it first; then pass "
            "trust_remote_code=True, on the command line --trust-remote-code."
        )

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.source, self.what)


class DataError(PosswapError, ValueError):
    """Text, tokens or a tokenizer that cannot be used as asked."""


class ConfigError(PosswapError, ValueError):
    """An invalid recipe; the message lists every problem with its key."""


class TrainingError(PosswapError, RuntimeError):
    """Training must not start or continue; the message gives the likely cause and the last good checkpoint."""


class TrainingStoppedError(TrainingError):
    """A training was asked to stop before its end and wrote a checkpoint: the same call resumes from it."""


class NumericError(PosswapError, RuntimeError):
    """A loss or a model's output is no longer a finite number."""


class NotEnoughMemoryError(PosswapError, MemoryError):
    """The operation needs more memory than is available; the message says how much, and what would fit."""


class TrainingWarning(_PosswapWarning):
    """Training continues in a degraded form; the message names the missing feature."""


class DataWarning(_PosswapWarning):
    """No text was given to measure on; the message says which is used instead."""


class BackendWarning(_PosswapWarning):
    """A faster attention backend is unavailable; the message says why, and what is used instead."""


class UntestedVersionWarning(_PosswapWarning):
    """transformers or torch is installed in an untested version; the message says what happens next."""


class MissingDependencyError(PosswapError, ImportError):
    """An optional extra is needed: the message gives the pip command."""

    def __init__(self, package: str, extra: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(f"{package} is needed here and not installed: pip install 'hf-posswap[{extra}]'.")

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.package, self.extra)
