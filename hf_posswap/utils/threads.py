"""Changes to state that all threads of a process share, made so that threads do not disturb each other."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TextIO, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

MAKING, _changing = threading.RLock(), threading.Lock()
"""MAKING guards the creation of process-wide singletons."""
PROCESS = threading.RLock()
"""Held while this package changes what the whole process reads: the default dtype, the environment, random numbers."""


def once(function: Function) -> Function:
    """Return `function` remembering its results, as `functools.cache`, each made once whoever asks meanwhile.

    Two threads that ask `functools.cache` at the same time get a result each: two classes where there should be one.

    Args:
        function: of hashable arguments, without keywords.

    Example:
        >>> made = once(lambda name: type(name, (), {}))
        >>> made("Row") is made("Row")
        True
    """
    results: dict[tuple[object, ...], object] = {}

    @wraps(function)
    def remembered(*args: object) -> object:
        if args not in results:
            with MAKING:  # one for all functions: they call each other
                if args not in results:
                    result = function(*args)
                    results.setdefault(args, result)  # the function may have asked for the same again
        return results[args]

    return cast(Function, remembered)


_shared: dict[str, tuple[int, Callable[[], None]]] = {}


@contextmanager
def shared(change: str, begin: Callable[[], Callable[[], None]]) -> Iterator[None]:
    """Keep a change of the process inside the block: the first user makes it, the last one reverts it.

    Args:
        change: is changed: the same text for the same change.
        begin: makes the change and returns the function that reverts it.
    """
    with _changing:
        count, undo = _shared[change] if change in _shared else (0, begin())
        _shared[change] = count + 1, undo
    try:
        yield
    finally:
        with _changing:
            count, undo = _shared.pop(change)
            if count > 1:
                _shared[change] = count - 1, undo
            else:
                undo()


_quiet: ContextVar[tuple[tuple[str, int], ...]] = ContextVar("quiet", default=())


class _Quiet(logging.Filter):
    """Drops the records that the thread which makes them does not want."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not any(
            record.levelno < level and f"{record.name}.".startswith(f"{name}.") for name, level in _quiet.get()
        )


_QUIET = _Quiet()


@contextmanager
def quiet_logger(name: str, level: int) -> Iterator[None]:
    """Show nothing below `level` that this thread logs in the block under the logger `name` or one inside it.

    Levels are not changed: other threads would miss what their own models and files are warned of.

    Example:
        >>> with quiet_logger("example", logging.ERROR):
        ...     logging.getLogger("example.inner").warning("not shown")
    """
    for handler in _handlers_under(name):
        handler.addFilter(_QUIET)  # never removed: a thread that walks through the filters would miss the next one
    before = _quiet.set((*_quiet.get(), (name, level)))
    try:
        yield
    finally:
        _quiet.reset(before)


def _handlers_under(name: str) -> Iterator[logging.Handler]:
    """Give all handlers that a record of the logger `name`, or of one inside it, may reach."""
    loggers = [logging.getLogger(name)]
    for known, logger in logging.root.manager.loggerDict.copy().items():
        if known.startswith(f"{name}.") and isinstance(logger, logging.Logger):
            loggers.append(logger)
    parent = loggers[0].parent
    while parent is not None:
        loggers.append(parent)
        parent = parent.parent
    for logger in loggers:
        yield from logger.handlers.copy()
    if logging.lastResort is not None:
        yield logging.lastResort


class _InThread:
    """Matches the warnings of one thread whose text begins with another one."""

    def __init__(self, message: str) -> None:
        self.message, self.thread = message, threading.get_ident()

    def match(self, text: str) -> bool:
        return threading.get_ident() == self.thread and text.startswith(self.message)


@contextmanager
def ignored_warnings(message: str = "", category: type[Warning] = Warning) -> Iterator[None]:
    """Ignore the warnings of this thread in the block whose text begins with `message`.

    `warnings.catch_warnings` gives the whole process its filters back at the end, and its function that shows warnings:
    two threads whose blocks overlap leave it those of the other's block, for ever. This adds one filter, which other
    threads do not match, and takes that one away.

    Example:
        >>> import warnings
        >>> with ignored_warnings("example"):
        ...     warnings.warn("example of a warning")
    """
    entry: Any = ("ignore", _InThread(message), category, None, 0)
    filters: Any = warnings.filters
    filters.insert(0, entry)
    try:
        yield
    finally:
        with _changing:
            for each in (filters, warnings.filters):  # another thread may have begun or ended a block of its own
                if entry in each:
                    cast("list[Any]", each).remove(entry)


_without_stderr: ContextVar[bool] = ContextVar("without_stderr", default=False)


class _Stderr:
    """A stream that drops what threads in `without_stderr` write, and passes on all else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return len(text) if _without_stderr.get() else self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


@contextmanager
def without_stderr() -> Iterator[None]:
    """Drop what this thread writes to `sys.stderr` in the block; other threads write there as before."""

    def begin() -> Callable[[], None]:
        stderr = sys.stderr
        stream = None if stderr is None else _Stderr(stderr)
        sys.stderr = stream

        def end() -> None:
            if sys.stderr is stream:  # it is another one where a thread has redirected it meanwhile
                sys.stderr = stderr

        return end

    with shared("sys.stderr", begin):
        before = _without_stderr.set(True)
        try:
            yield
        finally:
            _without_stderr.reset(before)


@contextmanager
def keep_log_level(name: str) -> Iterator[None]:
    """Give the logger `name` the level back that it had before the block, also where the block set another."""
    logger = logging.getLogger(name)
    level = logger.level
    try:
        yield
    finally:
        logger.setLevel(level)
