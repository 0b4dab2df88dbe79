"""Paths as people type them: `~` and `~name` stand for the home folder of a user."""

from __future__ import annotations

from pathlib import Path

from hf_posswap.errors import CheckpointError
from hf_posswap.utils.printable import brief_repr


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


def without_folder(name: str | None) -> str | None:
    """Return the last part of `name` if it is a path here, so that nothing public names private folders.

    Example:
        >>> without_folder("gpt2"), without_folder(None)
        ('gpt2', None)
    """
    path = None if name is None else expand_home(name)
    return name if path is None or not path.exists() else path.name
