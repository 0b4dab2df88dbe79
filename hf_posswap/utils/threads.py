"""Changes to state that all threads of a process share, made so that threads do not disturb each other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

MAKING, _changing = threading.RLock(), threading.Lock()
"""Held while something is made that there must be one of."""
PROCESS = threading.RLock()
"""Held while this package changes what the whole process reads: the default dtype, torch's random numbers, warnings."""


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
    results: dict[tuple[Any, ...], Any] = {}

    @wraps(function)
    def remembered(*args: Any) -> Any:
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


class _Quiet:
    """What blocks have asked of one logger, and the level that it has without them."""

    def __init__(self, level: int) -> None:
        self.level, self.asked = level, [logging.NOTSET]


_quiet: dict[str, _Quiet] = {}


@contextmanager
def quiet_logger(name: str, level: int) -> Iterator[None]:
    """Let the logger `name` log from `level` on alone until the block ends, and those of other threads that do so too.

    Whoever ends last gives it the level back that it had before the first; a level that is set meanwhile stays.
    """
    logger = logging.getLogger(name)
    with _changing:
        state = _quiet.setdefault(name, _Quiet(logger.level))
        state.asked.append(level)
        logger.setLevel(max(state.asked))
    try:
        yield
    finally:
        with _changing:
            untouched = logger.level == max(state.asked)
            state.asked.remove(level)
            if len(state.asked) == 1:
                del _quiet[name]
            if untouched:
                logger.setLevel(max(state.asked) if len(state.asked) > 1 else state.level)


@contextmanager
def keep_log_level(name: str) -> Iterator[None]:
    """Give the logger `name` the level back that it had before the block, also where the block set another."""
    logger = logging.getLogger(name)
    level = logger.level
    try:
        yield
    finally:
        logger.setLevel(level)
