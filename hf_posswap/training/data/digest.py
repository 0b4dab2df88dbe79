"""A digest of the rows that a training reads, whatever file or cache they came from."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from datetime import date
from typing import Any

import numpy as np
from torch import Tensor

_ROWS = 1000


def dataset_digest(dataset: Any) -> str | None:
    """Return a digest of every row of `dataset`; None: they cannot be read twice alike, or hold other than plain data.

    Rows of a `datasets.Dataset` and of a list or tuple are read; any other class may transform rows at random or stream
    them. Equal rows in equal order have an equal digest, while fingerprints of `datasets` depend on its cache.

    Args:
        dataset: as a Trainer has it, with the columns that the model reads.

    Example:
        >>> rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]
        >>> dataset_digest(rows) == dataset_digest(tuple(rows)), dataset_digest(rows) == dataset_digest(rows[:1])
        (True, False)
        >>> dataset_digest(iter(rows)) is None
        True
    """
    rows = _rows_of(dataset)
    if rows is None:
        return None
    whole = hashlib.sha256()
    try:
        for row in rows:
            whole.update(f"{json.dumps(row, sort_keys=True, default=_plain)}\n".encode())
    except TypeError:
        return None
    return whole.hexdigest()[:16]


def _rows_of(dataset: Any) -> Iterator[Any] | None:
    """Return the rows of `dataset`; None: its class may not give the same rows twice."""
    if isinstance(dataset, list | tuple):
        return iter(dataset)
    if importlib.util.find_spec("datasets") is None:
        return None
    from datasets import Dataset

    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":  # a transform of the user's
        return None
    plain = dataset.with_format(None)
    return (row for batch in plain.iter(_ROWS) for row in _unzipped(batch))


def _unzipped(batch: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    for values in zip(*batch.values(), strict=True):
        yield dict(zip(batch, values, strict=True))


def _plain(value: Any) -> Any:
    """Return what JSON does not know as text or numbers.

    Raises:
        TypeError: `value` is neither.
    """
    if isinstance(value, Tensor):
        value = value.detach().cpu()
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, date):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is no plain data")
