"""Records of older versions as records of today's: a checkpoint that was saved once loads for ever, or says what does.

A change that an older hf_posswap could misread raises `RECORD_VERSION` by one and adds one entry here, and a stored
record of the version it leaves to the tests.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from hf_posswap.errors import RecordError

RECORD_VERSION = 1
"""The version of the records that are written."""

Migration = Callable[[dict[str, Any]], dict[str, Any]]
"""Takes a record, which may be hostile, and returns a new one of the next version; it need not set the version."""

MIGRATIONS: dict[int, Migration | str] = {}
"""For each version before today's, what makes the next one of it; or the last release that reads it, where nothing
can. Version 1 is the first."""


def migrate(
    data: dict[str, Any],
    newest: int = RECORD_VERSION,
    migrations: Mapping[int, Migration | str] = MIGRATIONS,
) -> dict[str, Any]:
    """Return the record `data` in version `newest`; only its version has been checked.

    Raises:
        RecordError: its version is missing, newer or no longer supported, or it is not a record of that version.

    Example:
        >>> migrate({"version": 1, "span": 64}, 2, {1: lambda old: {"max_length": old["span"]}})
        {'max_length': 64, 'version': 2}
    """
    version = data.get("version")
    if type(version) is not int or not 1 <= version <= newest:
        known = "version 1" if newest == 1 else f"versions 1 to {newest}"
        raise RecordError(
            f"config.posswap has version {reprlib.repr(version)}; this hf_posswap reads {known}: "
            "update hf_posswap, or check the file."
        )
    for step in range(version, newest):
        migration = migrations[step]
        if isinstance(migration, str):
            raise RecordError(
                f"config.posswap has version {version}, which hf_posswap {migration} was the last to read: install "
                f"hf-posswap=={migration}, load the checkpoint there, unpatch it and save it; then swap it here."
            )
        try:
            data = migration(dict(data)) | {"version": step + 1}
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise RecordError(
                f"config.posswap says version {version} and is none of it ({type(error).__name__}: {error}): "
                "check the file."
            ) from error
    return data
