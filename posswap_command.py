"""Where the command `posswap` starts: Ctrl-C ends it quietly while its modules are still being imported, too.

It lies outside hf_posswap, for whoever imports a module of a package imports the package first.
"""

import os

_INTERRUPTED = 130
try:
    import signal
except KeyboardInterrupt:
    os._exit(_INTERRUPTED)


def main() -> None:
    """Run `posswap` on the process's arguments and leave with its exit code."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where a shell has it ignored
    if interruptible:
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))  # nothing has been begun yet
    from hf_posswap.cli.app import main as run

    try:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
