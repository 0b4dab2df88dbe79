"""What running frames hold, read so that their threads do not go on meanwhile; and what functions hold."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from types import CellType, FrameType, FunctionType, MethodType
from typing import Any

_reading = threading.RLock()
"""Held while no garbage is searched: whoever ended first would let it be searched while others read."""


def self_of(frame: FrameType) -> object:
    """Return what is called `self` in `frame`, which any thread may be running; None: nothing is.

    Touches `frame.f_locals`, until Python 3.13 (PEP 667) a dictionary that stays with the frame and is written anew by
    each read. Where the write drops the last reference to a former value, or a search for garbage falls into it, other
    threads run: the frame may end, and be read on after its end. So nothing is searched meanwhile, and the dictionary
    is left empty unless somebody else holds it. Without that CPython 3.11 crashes now and then, and what a forward has
    dropped lives on until it ends.
    """
    if sys.version_info >= (3, 13):
        return frame.f_locals.get("self")
    with _reading:
        return _read(frame)


def _read(frame: FrameType) -> object:
    searched = gc.isenabled()
    gc.disable()
    try:
        frame_locals = frame.f_locals
        instance = frame_locals.get("self")
        # a body of a module or class has no other locals; of the references one is the frame's, one the count's own
        if (
            frame.f_code.co_flags & inspect.CO_OPTIMIZED
            and frame.f_trace is None
            and sys.getrefcount(frame_locals) == 3
        ):
            frame_locals.clear()
    finally:
        if searched:
            gc.enable()
    return instance


def stacks_of_threads() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by its ident; without a GIL that of this thread alone.

    There the other threads run while their frames are read, which may crash Python.

    Touches `sys._is_gil_enabled` (Python 3.13 and later). Without it no build can be told from one with a GIL.
    """
    enabled = getattr(sys, "_is_gil_enabled", None)
    if enabled is None or enabled():
        return sys._current_frames()
    return {threading.get_ident(): sys._getframe(1)}


def can_be_suspended(frame: FrameType) -> bool:
    """Return whether `frame` is of a generator or coroutine: while it is suspended it has no caller in `f_back`.

    Touches the code flags that `inspect` documents.
    """
    return bool(frame.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR))


def packages_of(function: object) -> set[str]:
    """Return the top-level packages that `function` is code of: its own, and those of the functions that it wraps.

    A function is of the package that its global names are in, whatever `functools.wraps` says; an object that can be
    called is of that of its class. Touches `__globals__`, `__func__` and `__wrapped__`, which the language reference
    documents (Python 3.11 to 3.13).

    Example:
        >>> packages_of(inspect.getsource), packages_of(functools.partial(print))
        ({'inspect'}, {'functools'})
    """
    packages = set()
    while function is not None:
        plain = getattr(function, "__func__", function)
        names = plain.__globals__ if isinstance(plain, FunctionType) else {"__name__": type(plain).__module__}
        packages.add(names.get("__name__", "").partition(".")[0])
        function = getattr(plain, "__wrapped__", None)
    return packages


def rebound(function: object, copies: Mapping[int, object], _above: tuple[int, ...] = ()) -> Any:
    """Return `function` with what it holds of copied objects _exchanged for the copies; itself if it holds none.

    `copy.deepcopy` shares functions. A forward that TRL or accelerate put on a model reaches that model by its closure,
    so a copy of the model would run the original. Touches the attributes of functions, methods and cells that the
    language reference documents (Python 3.11 to 3.13).

    Args:
        function: a function, a method, a partial, or an object with `__call__` that holds such.
        copies: the copies by the id of the original, as `copy.deepcopy` leaves them in its memo.

    Example:
        >>> def holding(value):
        ...     return lambda: value
        >>> old, new = [1], [2]
        >>> rebound(holding(old), {id(old): new})()
        [2]
    """
    if id(function) in _above:
        return function
    above = (*_above, id(function))

    def _exchanged(value: object) -> Any:
        if id(value) in copies and not isinstance(value, FunctionType | MethodType):
            return copies[id(value)]
        return rebound(value, copies, above) if callable(value) and not isinstance(value, type) else value

    if isinstance(function, MethodType):
        bound = (function.__func__, function.__self__)
        new = tuple(map(_exchanged, bound))
        return function if _same(bound, new) else MethodType(*new)
    if isinstance(function, functools.partial):
        values = (function.func, *function.args, *function.keywords.values())
        new = tuple(map(_exchanged, values))
        count = 1 + len(function.args)
        keywords = dict(zip(function.keywords, new[count:], strict=True))
        return function if _same(values, new) else functools.partial(new[0], *new[1:count], **keywords)
    if isinstance(function, FunctionType):
        return _rebound_closure(function, _exchanged)
    held_by_name = vars(function) if hasattr(function, "__dict__") and id(function) not in copies else {}
    new_by_name = {name: _exchanged(value) for name, value in held_by_name.items()}
    if _same(held_by_name.values(), new_by_name.values()):
        return function
    twin = object.__new__(type(function))  # accelerate's refuses copy.copy
    vars(twin).update(new_by_name)
    return twin


def _rebound_closure(function: FunctionType, _exchanged: Callable[[object], object]) -> FunctionType:
    cells = [(cell, cell.cell_contents) for cell in function.__closure__ or () if not _is_empty(cell)]
    new = {id(cell): value for cell, before in cells if (value := _exchanged(before)) is not before}
    wrapped, named = vars(function).get("__wrapped__"), function.__globals__
    used = {name: named[name] for name in function.__code__.co_names if name in named}
    objects = {name: value for name, value in used.items() if not isinstance(value, FunctionType | type)}
    reached = {name: value for name, before in objects.items() if (value := _exchanged(before)) is not before}
    if not new and not reached and (wrapped is None or _exchanged(wrapped) is wrapped):
        return function
    closure = tuple(CellType(new[id(cell)]) if id(cell) in new else cell for cell in function.__closure__ or ())
    names = named | reached if reached else named  # a notebook's forward reaches its model by a global name
    twin = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure or None)
    twin.__kwdefaults__ = function.__kwdefaults__
    vars(twin).update(vars(function))
    if wrapped is not None:
        vars(twin)["__wrapped__"] = _exchanged(wrapped)
    return twin


def _is_empty(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _same(before: Iterable[object], after: Iterable[object]) -> bool:
    return all(first is second for first, second in zip(before, after, strict=True))
