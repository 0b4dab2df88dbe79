"""What a running thread's frame holds, read so that the thread does not go on meanwhile."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
from types import FrameType
from typing import Any

_reading = threading.RLock()
"""Held while no garbage is searched: whoever ended first would let it be searched while others read."""


def self_of(frame: FrameType) -> Any:
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


def _read(frame: FrameType) -> Any:
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
