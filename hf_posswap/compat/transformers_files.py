"""Files of a model folder or a repository of the Hub, one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def file_of(source: str | Path, name: str, *, certain: bool = True, **hub: Any) -> Path | None:
    """Return where the file `name` of a folder or Hub id is, downloaded if need be; None where there is no such file.

    Touches `transformers.utils.cached_file` and its arguments `_raise_exceptions_for_missing_entries`,
    `..._for_gated_repo` and `..._for_connection_errors` (transformers 5.14 to 5.23). Without it a file that is not
    there cannot be told from one that cannot be reached.

    Args:
        source: a folder or a Hub id.
        name: of the file.
        certain: raise where the Hub does not tell whether there is such a file; otherwise that counts as none.
        hub: arguments for the Hub: revision, token, cache_dir, ...

    Raises:
        OSError: it cannot be told.
    """
    from transformers.utils import cached_file

    path = cached_file(
        str(source),
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=certain,
        _raise_exceptions_for_connection_errors=certain,
        **hub,
    )
    return None if path is None else Path(path)
