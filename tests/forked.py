"""Processes forked from this one: they start at once, where a fresh one imports torch and transformers for seconds.

Several at once are one launch: each finds in its environment what torchrun would put there.
"""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.util
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Process = Any
_LONGEST_FOLDER = 60


def start(work: Callable[[], object], environment: Mapping[str, str] | None = None) -> Process:
    """Start `work` in a process of its own, with `environment` added to this one's."""

    def run() -> None:
        os.environ.update(environment or {})
        torch.set_num_threads(1)
        work()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def run_script(script: Path, *arguments: str) -> None:
    """Run a Python script in this process as its user does."""
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def run_ranks(work: Callable[[], object], count: int = 2, environment: Mapping[str, str] | None = None) -> None:
    """Run `work` in `count` processes of one launch, and check that each ends well."""
    launched = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    launched |= {"MASTER_PORT": str(free_port()), **(environment or {})}
    ranks = [start(lambda: afresh(work), {**launched, "RANK": str(n), "LOCAL_RANK": str(n)}) for n in range(count)]
    _wait(ranks)
    assert [rank.exitcode for rank in ranks] == [0] * count


def afresh(work: Callable[[], object]) -> None:
    """Run `work` as if accelerate had not yet learned in this process how it was launched."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    work()


def _wait(ranks: Sequence[Process], most: float = 200.0) -> None:
    """Wait for all; one that fails, or time that is up, ends them all, as they wait for each other."""
    ends = time.monotonic() + most
    while any(rank.is_alive() for rank in ranks):
        if time.monotonic() > ends or any(rank.exitcode for rank in ranks):
            for rank in ranks:
                rank.kill()
        ranks[0].join(0.02)
        time.sleep(0.02)
    for rank in ranks:
        rank.join()


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Ready:
    """Runs programs in processes that a fresh Python forks, one that has imported `modules` and nothing of the tests.

    So they start at once, and find what a fresh process finds: no state, handler or filter of these tests.

    Args:
        modules: what takes long to import.
    """

    def __init__(self, *modules: str) -> None:
        _keep_sockets_short()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(modules))

    def run(
        self,
        main: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        *,
        answers: str = "",
        most: float = 250.0,
    ) -> subprocess.CompletedProcess[str]:
        """Call `main`, "module:function", with the command line `arguments`, what it says going to files in `folder`.

        Args:
            main: a program without parameters.
            arguments: after its name.
            environment: all of it.
            folder: for this call alone.
            answers: what it reads on its standard input.
            most: seconds that it may take.
        """
        files = [folder / "stdin", folder / "stdout", folder / "stderr"]
        files[0].write_text(answers, encoding="utf-8")
        given = (main, list(arguments), dict(environment), list(map(str, files)))
        process = self._context.Process(target=_program, args=given)
        process.start()
        process.join(most)
        if process.is_alive():
            process.kill()
            raise TimeoutError(f"{main} {' '.join(arguments)} took more than {most} s")
        out, err = (path.read_text(encoding="utf-8") for path in files[1:])
        return subprocess.CompletedProcess([main, *arguments], int(process.exitcode or 0), out, err)


def _keep_sockets_short() -> None:
    """Have multiprocessing put its sockets where their paths are short enough: the system allows about 100 bytes."""
    before = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER:
        tempfile.tempdir = "/tmp"
    multiprocessing.util.get_temp_dir()  # made once, and kept
    tempfile.tempdir = before


def _program(main: str, arguments: list[str], environment: dict[str, str], files: list[str]) -> None:
    os.dup2(os.open(files[0], os.O_RDONLY), 0)
    for number, path in enumerate(files[1:], 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    sys.stdout, sys.stderr = (open(n, "w", encoding="utf-8", closefd=False) for n in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    module, function = main.split(":")
    sys.argv = [module, *arguments]
    getattr(importlib.import_module(module), function)()
