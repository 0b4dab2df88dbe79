"""Ctrl-C, heard only where it does no harm."""

from __future__ import annotations

import signal
import threading
from types import TracebackType
from typing import Self


class Interrupts:
    """Inside a `with` block, Ctrl-C waits for the next `check()`, or for the end of the block.

    An interrupt in the middle of patching a model would leave it half patched. Where Ctrl-C does not mean
    KeyboardInterrupt (another thread, a handler of one's own), nothing is changed.

    Example:
        >>> with Interrupts() as interrupts:
        ...     interrupts.check()
        >>> interrupts.asked
        False
    """

    def __init__(self) -> None:
        self.asked = self._held = False

    def __enter__(self) -> Self:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._held = True
        return self

    def _note(self, *_: object) -> None:
        self.asked = True

    def check(self) -> None:
        """Raise the KeyboardInterrupt that was held back, if there is one."""
        if self.asked:
            raise KeyboardInterrupt

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._held:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None:
            self.check()
