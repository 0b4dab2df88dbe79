"""The names of the models of a comparison, and the baseline among them, both known before any model is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hf_posswap.errors import OptionError, UnknownNameError
from hf_posswap.utils.user_paths import expand_home

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONTROL = "control"
_WEIGHTS_FOLDER = "model"  # the folder for weights inside a training run's folder


class Named(Protocol):
    """An object with a source and an optional name, such as a `Candidate`."""

    @property
    def source(self) -> PreTrainedModel | str | Path: ...

    @property
    def name(self) -> str | None: ...

    def label_of(self, source: str) -> str:
        """Return its name in results for a source named `source`."""


def source_names(sources: Iterable[str | Path]) -> dict[str, str]:
    """Return a name for each folder or Hub id: the last component, and as many before it as make it unique.

    A training writes `RUN/model`: such a folder is named after the run.

    Args:
        sources: folders and Hub ids as given, possibly with repetitions.

    Example:
        >>> source_names(["me/gpt2", "you/gpt2", "llama"])
        {'me/gpt2': 'me/gpt2', 'you/gpt2': 'you/gpt2', 'llama': 'llama'}
        >>> source_names(["."]) == {".": Path.cwd().name}
        True
    """
    components = {str(source): _path_components(str(source)) for source in sources}
    depth = {source: 1 for source in components}
    while True:
        names = {source: "/".join(components[source][-depth[source] :]) for source in components}
        duplicates = [source for source in names if sum(names[source] == other for other in names.values()) > 1]
        longer = [source for source in duplicates if depth[source] < len(components[source])]
        if not longer:
            return names
        for source in longer:
            depth[source] += 1


def _path_components(source: str) -> tuple[str, ...]:
    """Return the components of a path, without the weights folder of a training run."""
    path = expand_home(source)
    if not path.is_dir():
        return tuple(component for component in source.split("/") if component) or (source,)
    components = tuple(component for component in Path(os.path.abspath(path)).parts if component != os.sep) or (source,)
    return components[:-1] if components[-1] == _WEIGHTS_FOLDER and len(components) > 1 else components


def candidate_names(candidates: Sequence[Named]) -> list[str]:
    """Return the names of `candidates`, in order: the given ones, or those derived by `source_names`.

    Raises:
        OptionError: there are no candidates, a name is empty, or two names are equal.
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
    """Check that the names are not empty and unique.

    Raises:
        OptionError: as `candidate_names`.

    Example:
        >>> check_names(["a", "a"])
        Traceback (most recent call last):
        hf_posswap.errors.OptionError: a comparison needs models with unique names, got ['a', 'a']: name each of them, \
NAME=MODEL on the command line, Candidate(name=...) in Python.
    """
    if not names or len(set(names)) < len(names) or not all(name.strip() for name in names):
        raise OptionError(
            f"a comparison needs models with unique names, got {list(names)}: name each of them, NAME=MODEL on the "
            "command line, Candidate(name=...) in Python."
        )


def reference_name(names: Sequence[str], baseline: str | None = None) -> str:
    """Return the name of the baseline: `baseline`, else the control, else the first.

    Args:
        names: the models' names; the control is the one whose last component is "control".
        baseline: the requested baseline, or None.

    Raises:
        UnknownNameError: no model is called `baseline`.

    Example:
        >>> reference_name(["base", "control", "rope"]), reference_name(["base", "rope"])
        ('control', 'base')
    """
    if baseline is not None and baseline not in names:
        raise UnknownNameError("baseline model", baseline, list(names))
    controls = [name for name in names if is_control(name)]
    return baseline or (controls[0] if controls else names[0])


def is_control(name: str) -> bool:
    """Return whether `name` is that of a control, which is trained like the others but without a swap.

    Example:
        >>> is_control("small/control"), is_control("control+rope")
        (True, False)
    """
    return name.rpartition("/")[2] == CONTROL
