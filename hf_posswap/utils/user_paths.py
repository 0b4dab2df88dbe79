"""Paths as people type them, and modules of their own, which register schemes or families.

In a path `~` and `~name` stand for the home folder of a user. A module is imported by file or by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

from hf_posswap.errors import CheckpointError, OptionError
from hf_posswap.utils.format import said_by
from hf_posswap.utils.printable import brief_repr
from hf_posswap.utils.threads import PROCESS

SUFFIX = ".py"


def expand_home(path: str | Path) -> Path:
    """Return `path` with `~` and `~name` at its beginning replaced by the home folder of that user.

    Raises:
        CheckpointError: there is no such user, or the user has no home folder.

    Example:
        >>> expand_home("runs/rope")
        PosixPath('runs/rope')
        >>> expand_home("~no-such-user/rope")
        Traceback (most recent call last):
        hf_posswap.errors.CheckpointError: '~no-such-user/rope': '~no-such-user' is the home folder of no user of this \
machine. Give the path in full; for a folder that is called so, './~no-such-user/rope'.
    """
    given = Path(path)
    try:
        return given.expanduser()
    except (RuntimeError, ValueError) as error:  # ValueError: a null byte in the name
        user, shown = given.parts[0], brief_repr(str(path))
        lacks = "this user has no home folder, and HOME is not set" if user == "~" else None
        raise CheckpointError(
            f"{shown}: {lacks or f'{brief_repr(user)} is the home folder of no user of this machine'}. Give the path "
            f"in full; for a folder that is called so, {brief_repr(f'./{path}')}."
        ) from error


def real_path(path: str | Path) -> Path:
    """Return the full `path`, without `~` and without links; what lies behind links in a loop stays as it is.

    `Path.resolve` raises RuntimeError there, before Python 3.13.

    Raises:
        CheckpointError: as `expand_home`.

    Example:
        >>> real_path("/runs/../runs/rope")
        PosixPath('/runs/rope')
    """
    return Path(os.path.realpath(expand_home(path)))


def without_folder(name: str | None) -> str | None:
    """Return the last part of `name` if it is a path here, so that nothing public names private folders.

    Example:
        >>> without_folder("gpt2"), without_folder(None)
        ('gpt2', None)
    """
    path = None if name is None else expand_home(name)
    return name if path is None or not path.exists() else path.name


def import_module(name: str) -> ModuleType:
    """Import a module, once in a process, and return it: its decorators register what it defines.

    Its prints go to standard error: on standard output may be JSON that a program reads.

    A file becomes a module of its name without .py, so that other processes, pickles and checkpoints find it again
    where its folder is on `PYTHONPATH`, or is the current one.

    Args:
        name: a file, "my_schemes.py", or the name of an installed module.

    Raises:
        OptionError: there is no such file or module, its name is taken by another module, or its code fails.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "my_example_schemes.py"
        ...     _ = path.write_text("ANSWER = 42")
        ...     import_module(str(path)).ANSWER
        42
    """
    if not name.endswith(SUFFIX):
        try:
            with redirect_stdout(sys.stderr):
                module = importlib.import_module(name)
        except Exception as error:  # somebody's own code may raise anything
            raise OptionError(
                f"cannot import {name!r}: {type(error).__name__}: {said_by(error)}. Give a file that ends in .py, or a "
                "module that Python finds."
            ) from error
        if getattr(module, "__file__", None) is None and hasattr(module, "__path__"):
            raise OptionError(
                f"cannot import {name!r}: it is a folder without __init__.py. Give a file that ends in .py."
            )
        return module
    with PROCESS:  # of several threads one runs it
        return _import_file(name)


def _import_file(name: str) -> ModuleType:
    path = real_path(name)
    if not path.is_file():
        raise OptionError(f"cannot import {name!r}: there is no such file.")
    known = sys.modules.get(path.stem)
    if known is not None and Path(getattr(known, "__file__", None) or "").resolve() == path:
        return known
    other = getattr(known, "__file__", None) or "built in" if known is not None else _installed(path)
    if other is not None:
        raise OptionError(
            f"cannot import {name!r}: Python has another module {path.stem!r} already, {other}. Rename the file."
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "a file that ends in .py has a loader"
    assert spec.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[path.stem]
        if not isinstance(error, Exception):
            raise
        raise OptionError(f"cannot import {name!r}: {type(error).__name__}: {said_by(error)}") from error
    return module


def _installed(path: Path) -> str | None:
    """Return the file of another module of the name of the file at `path`, which an import would find, or None."""
    try:
        spec = importlib.util.find_spec(path.stem.partition(".")[0])
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or Path(spec.origin).resolve() == path:
        return None
    return spec.origin
