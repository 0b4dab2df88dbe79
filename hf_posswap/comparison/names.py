"""What the models of a comparison are called, and which of them the others are held against: known before any loads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from hf_posswap.errors import DataError, UnknownNameError
from hf_posswap.utils.user_paths import expand_home

CONTROL = "control"
_TRAINED = "model"  # where a training writes its weights, inside the run's folder


class Named(Protocol):
    """What has a source and may have a name: a `Candidate`."""

    @property
    def source(self) -> Any: ...

    @property
    def name(self) -> str | None: ...

    def label_of(self, source: str) -> str:
        """Return its name, where its source is called `source`."""


def source_names(sources: Iterable[str | Path]) -> dict[str, str]:
    """Return a name for each folder or Hub id: its last part, and more of its path where that alone is another's too.

    A training writes `RUN/model`: such a folder goes by the name of the run.

    Args:
        sources: folders and Hub ids, as they were given; the same one may come more than once.

    Example:
        >>> source_names(["me/gpt2", "you/gpt2", "llama"])
        {'me/gpt2': 'me/gpt2', 'you/gpt2': 'you/gpt2', 'llama': 'llama'}
        >>> source_names(["."]) == {".": Path.cwd().name}
        True
    """
    parts = {str(source): _parts(str(source)) for source in sources}
    shown = {source: 1 for source in parts}
    while True:
        names = {source: "/".join(parts[source][-shown[source] :]) for source in parts}
        alike = [source for source in names if sum(names[source] == other for other in names.values()) > 1]
        longer = [source for source in alike if shown[source] < len(parts[source])]
        if not longer:
            return names
        for source in longer:
            shown[source] += 1


def _parts(source: str) -> tuple[str, ...]:
    """Return the parts of a path, of which the last names it."""
    place = expand_home(source)
    if not place.is_dir():
        return tuple(part for part in source.split("/") if part) or (source,)
    parts = tuple(part for part in Path(os.path.abspath(place)).parts if part != os.sep) or (source,)
    return parts[:-1] if parts[-1] == _TRAINED and len(parts) > 1 else parts


def candidate_names(candidates: Sequence[Named]) -> list[str]:
    """Return the names of `candidates`, in order: those they were given, or what `source_names` makes of their sources.

    Raises:
        DataError: there are no candidates, a name is empty, or two are called the same.
    """
    known = source_names(c.source for c in candidates if c.name is None and isinstance(c.source, str | Path))
    names = []
    for candidate in candidates:
        source = candidate.source
        plain = known.get(str(source), "") if isinstance(source, str | Path) else type(source).__name__
        names.append(candidate.label_of(plain))
    check_names(names)
    return names


def check_names(names: Sequence[str]) -> None:
    """Check that these can be the names of a comparison.

    Raises:
        DataError: as `candidate_names`.

    Example:
        >>> check_names(["a", "a"])
        Traceback (most recent call last):
        hf_posswap.errors.DataError: a comparison needs models with names of their own, got ['a', 'a']: set Candidate(name=...), or write NAME=MODEL on the command line.
    """  # noqa: E501
    if not names or len(set(names)) < len(names) or not all(name.strip() for name in names):
        raise DataError(
            f"a comparison needs models with names of their own, got {list(names)}: set Candidate(name=...), or write "
            "NAME=MODEL on the command line."
        )


def reference_name(names: Sequence[str], against: str | None = None) -> str:
    """Return which of `names` the others are held against: the one asked for, the control, or the first.

    Args:
        names: of the models; the control is the one called "control", in a folder of whatever name.
        against: that was asked for, or None.

    Raises:
        UnknownNameError: none is called `against`.

    Example:
        >>> reference_name(["base", "control", "rope"]), reference_name(["base", "rope"])
        ('control', 'base')
    """
    if against is not None and against not in names:
        raise UnknownNameError("model to hold the others against", against, list(names))
    controls = [name for name in names if is_control(name)]
    return against or (controls[0] if controls else names[0])


def is_control(name: str) -> bool:
    """Return whether `name` is that of a control: what was trained as the others were, without a swap.

    Example:
        >>> is_control("small/control"), is_control("control+rope")
        (True, False)
    """
    return name.rpartition("/")[2] == CONTROL
