"""How a command ends: its exit code, and one line on stderr for an error."""

from __future__ import annotations

import _thread
import copy
import errno
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from hf_posswap import errors
from hf_posswap.utils.printable import printable

if TYPE_CHECKING:
    from types import FrameType

DEBUG = "POSSWAP_DEBUG"


class Code(IntEnum):
    """Exit codes of `posswap`."""

    OK = 0
    OTHER = 1
    USAGE = 2
    UNSUPPORTED = 3
    FILES = 4
    INTERRUPTED = 130
    STOPPED = 143


MEANING = {
    Code.OK: "done",
    Code.USAGE: "the command line is wrong: an option, a name, a value",
    Code.UNSUPPORTED: "this swap, this model, or this length of it, is not supported",
    Code.FILES: "a model, a checkpoint or data cannot be read or written",
    Code.OTHER: "anything else",
    Code.INTERRUPTED: "interrupted by Ctrl-C",
    Code.STOPPED: "stopped by SIGTERM, which a training can resume from",
}

_CODES: tuple[tuple[Code, tuple[type[Exception], ...]], ...] = (
    (Code.USAGE, (errors.UnknownNameError, errors.OptionError, errors.SchemeError, errors.ConfigError)),
    (
        Code.UNSUPPORTED,
        (
            errors.UnsupportedSwapError,
            errors.UnsupportedModelError,
            errors.AlreadyPatchedError,
            errors.NotPatchedError,
            errors.PositionRangeError,
            errors.NotEnoughMemoryError,
        ),
    ),
    (Code.STOPPED, (errors.TrainingStoppedError,)),
    (Code.FILES, (errors.CheckpointError, errors.RecordError, errors.DataError, OSError)),
)


def code_of(error: Exception) -> Code:
    """Return the exit code for `error`.

    Example:
        >>> code_of(errors.CheckpointError("no such folder"))
        <Code.FILES: 4>
    """
    return next((code for code, classes in _CODES if isinstance(error, classes)), Code.OTHER)


def line_of(error: Exception) -> str:
    """Format `error` as one line.

    Example:
        >>> line_of(errors.SchemeError("yarn: give factor\\nor max_length."))
        'yarn: give factor or max_length.'
    """
    text = printable(" ".join(str(error).split()))
    if isinstance(error, errors.PosswapError):
        return text
    if isinstance(error, OSError):
        quoted = "" if error.filename is None else repr(str(error.filename))
        return " ".join(filter(None, [error.strerror or text or type(error).__name__, quoted]))
    return f"unexpected {type(error).__name__}: {text or 'no message'}. {DEBUG}=1 shows where it happened."


_IMPORT = "--import"
_IMPORTER = "<frozen importlib._bootstrap>"
_LONGEST_IMPORT, _POLL = 10.0, 0.02
"""Seconds that Ctrl-C waits for the end of imports, and between two looks."""
_interrupted = threading.Event()
_moments: list[float] = []


def note_interrupts() -> None:
    """Report Ctrl-C as an interrupt, even if a library turns the KeyboardInterrupt into another error."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def was_interrupted() -> bool:
    """Return whether Ctrl-C was pressed since `note_interrupts`."""
    return _interrupted.is_set()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; during an import wait for its end, because C++ code that is loaded may abort on it."""
    _interrupted.set()
    _moments.append(time.monotonic())
    importing = frame
    while importing is not None and importing.f_code.co_filename != _IMPORTER:
        importing = importing.f_back
    if importing is not None and _moments[-1] - _moments[0] < _LONGEST_IMPORT:
        again = threading.Timer(_POLL, _thread.interrupt_main, (number,))
        again.daemon = True
        again.start()
        return
    signal.default_int_handler(number, frame)


class _OneLine:
    """Mixin that reports an error as one line on stderr and an exit code, never as a traceback."""

    def invoke(self, ctx: Any) -> object:
        try:
            return super().invoke(ctx)  # type: ignore[misc]
        except (errors.PosswapError, OSError) as error:
            if _interrupted.is_set():
                raise KeyboardInterrupt from error
            if getattr(error, "errno", None) == errno.EPIPE:  # the reader, such as `head`, closed the pipe
                raise
            raise _end(error) from None
        except Exception as error:
            if _interrupted.is_set():
                raise KeyboardInterrupt from error
            if type(error).__module__.partition(".")[0] in ("typer", "click"):  # usage errors, and typer's own exits
                raise
            raise _end(error) from None


class PosswapGroup(_OneLine, TyperGroup):
    """A group of commands that reports an error as one line on stderr and an exit code.

    An `--import FILE` behind a command is taken as one before it; `--import MODULE:NAME`, of posswap check, is not.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        imports: list[str] = []
        rest: list[str] = []
        number = 0
        while number < end:
            option, equals, value = args[number].partition("=")
            arguments = args[number : number + (2 if option == _IMPORT and not equals else 1)]
            value = value if equals else arguments[-1]
            is_module_and_name = ":" in value and not value.endswith(".py")
            (rest if option != _IMPORT or is_module_and_name else imports).extend(arguments)
            number += len(arguments)
        return super().parse_args(ctx, [*imports, *rest, *args[end:]])


class OneNameCommand(TyperCommand):
    """A command that shows the first name of each option alone: `--baseline`, of `"--baseline", "--against"`.

    The other long names are older ones. They are accepted, and neither help nor completion nor an error shows them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.older = []
        """A copy of each option that has older names, with these names alone."""
        for param in self.params:
            names = [name for name in param.opts if name.startswith("--")][1:]
            if names:
                alias = copy.copy(param)
                alias.opts = names
                param.opts = [name for name in param.opts if name not in names]
                self.older.append(alias)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        shown = (param for param in self.get_params(ctx) if not getattr(param, "hidden", False))
        return [
            *([self.options_metavar] if self.options_metavar else []),
            *(piece for param in shown for piece in param.get_usage_pieces(ctx)),
        ]

    def make_parser(self, ctx: Any) -> Any:
        parser = super().make_parser(ctx)
        for alias in self.older:
            alias.add_to_parser(parser, ctx)
        return parser


class PosswapCommand(_OneLine, OneNameCommand):
    """A command that reports an error as one line on stderr and an exit code."""


def script(*commands: Callable[..., None]) -> typer.Typer:
    """Wrap `commands` as a standalone application with the error handling and exit codes of `posswap`.

    Args:
        commands: one, or several, which the first argument then names.

    Example:
        >>> def main(count: int) -> None:
        ...     raise errors.DataError(f"{count} documents are too few.")
        >>> from typer.testing import CliRunner
        >>> done = CliRunner().invoke(script(main), ["3"])
        >>> int(done.exit_code), done.stderr
        (4, 'error: 3 documents are too few.\\n')
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    for command in commands:
        app.command(cls=PosswapCommand)(command)
    return app


def _end(error: Exception) -> typer.Exit:
    if os.environ.get(DEBUG, "0") not in ("", "0"):
        traceback.print_exception(error)
    process = os.environ.get("RANK", "0")  # set by a distributed launch
    typer.echo(f"error{'' if process == '0' else f' on process {process}'}: {line_of(error)}", err=True)
    return typer.Exit(code_of(error))
