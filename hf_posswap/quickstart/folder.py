"""The folder of a quickstart, which belongs to one set of settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_posswap.errors import CheckpointError
from hf_posswap.utils.atomic_io import read_json, writable_folder, write_json

_SETTINGS = "quickstart.json"
LOCK = ".quickstart.lock"
"""Lock of a running quickstart; its trainings and its comparison have separate locks."""


def open_folder(out: Path, identity: dict[str, Any]) -> None:
    """Check that `out` can be the folder of the quickstart with `identity`; create it if it is missing.

    Args:
        out: a new or empty folder, or that of an earlier run.
        identity: everything that the numbers depend on, as JSON data.

    Raises:
        CheckpointError: it cannot be written, holds something else, or belongs to a run with other settings.
    """
    if out.is_dir() and any(path.name != LOCK for path in out.iterdir()) and not (out / _SETTINGS).exists():
        raise CheckpointError(f"{out} is not empty and holds no quickstart: choose another folder with --out.")
    writable_folder(out)
    differing = _differences(read_json(out / _SETTINGS), identity) if (out / _SETTINGS).exists() else []
    if differing:
        raise CheckpointError(
            f"{out} holds a quickstart with other settings ({'; '.join(differing)}): choose another folder with "
            "--out, or delete this one."
        )


def claim_folder(out: Path, identity: dict[str, Any]) -> None:
    """Mark `out` as the folder of this quickstart, after all checks have passed.

    Raises:
        CheckpointError: it cannot be written.
    """
    write_json(out / _SETTINGS, identity)


def _differences(before: Any, now: Any, name: str = "") -> list[str]:
    """Return the differences of two JSON values, each as "name was this and is that"."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted({*before, *now})
        return [d for key in keys for d in _differences(before.get(key), now.get(key), f"{name}.{key}".lstrip("."))]
    return [] if before == now else [f"{name} was {before!r} and is {now!r}"]
