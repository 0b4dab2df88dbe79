"""Entry point of the command `posswap`: Ctrl-C ends it quietly even while its modules are being imported.

For this, the module imports nothing of the package at first; `import hf_posswap` itself takes milliseconds.
"""

import atexit
import os
import signal
import sys

_INTERRUPTED = 130


def main() -> None:
    """Run `posswap` on the process's arguments and leave with its exit code."""
    is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell may have it ignored
    if is_interruptible:
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))  # at once: nothing has begun yet
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # or Ctrl-C kills an interpreter that shuts down
    from hf_posswap.cli.app import main as run

    try:
        if is_interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    finally:
        if is_interruptible:
            signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))  # all is written: only threads are awaited
