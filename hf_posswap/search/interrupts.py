"""Deferral of Ctrl-C to points where it is safe."""

from __future__ import annotations

import signal
import threading
from types import TracebackType
from typing import Self


class Interrupts:
    """Inside a `with` block, Ctrl-C is deferred to the next `check()`, or to the end of the block.

    An interrupt while a model is patched would leave it half patched. If Ctrl-C does not raise KeyboardInterrupt (in
    another thread, or with a custom handler), nothing is changed.

    Example:
        >>> with Interrupts() as interrupts:
        ...     interrupts.check()
        >>> interrupts.asked
        False
    """

    def __init__(self) -> None:
        self.asked = self._is_installed = False

    def __enter__(self) -> Self:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._is_installed = True
        return self

    def _note(self, *_: object) -> None:
        self.asked = True

    def check(self) -> None:
        """Raise a deferred KeyboardInterrupt, if there is one."""
        if self.asked:
            raise KeyboardInterrupt

    def __exit__(self, error_type: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if error_type is None:
            self.check()
