"""A search on disk: what it is a search of, and how far it has come."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hf_posswap.errors import CheckpointError
from hf_posswap.search.candidates import Candidate
from hf_posswap.utils.atomic_io import read_json, writable_folder, write_text

FORMAT = 1


@dataclass(frozen=True)
class Member:
    """A measured candidate, and its mean loss in nats a token."""

    candidate: Candidate
    loss: float


@dataclass
class Progress:
    """How far a search has come.

    Attributes:
        iteration: the last that is whole; 0: the first population.
        population: those that live, best first.
        seen: every candidate that was measured.
        seeds: loss of each seed.
        best: loss of the best, after each iteration from 0 on.
        evaluations: candidates measured, after each iteration.
    """

    iteration: int = -1
    population: list[Member] = field(default_factory=list)
    seen: set[Candidate] = field(default_factory=set)
    seeds: dict[str, float] = field(default_factory=dict)
    best: list[float] = field(default_factory=list)
    evaluations: list[int] = field(default_factory=list)


def save_progress(path: Path, identity: dict[str, Any], progress: Progress) -> None:
    """Write `progress` of the search `identity` to `path`, whole or not at all.

    Raises:
        CheckpointError: it cannot be written.
    """
    held = dataclasses.asdict(progress)
    held["population"] = [[*dataclasses.astuple(m.candidate), m.loss] for m in progress.population]
    held["seen"] = [dataclasses.astuple(candidate) for candidate in sorted(progress.seen, key=dataclasses.astuple)]
    write_text(path, json.dumps({"format": FORMAT, "search": identity, "progress": held}, allow_nan=False) + "\n")


def load_progress(path: Path, identity: dict[str, Any]) -> Progress:
    """Return the progress in `path`, or that of a new search where there is no such file yet.

    Raises:
        CheckpointError: the place cannot be written, the file is no state of a search, or one of another search.
    """
    if path.is_dir():
        raise CheckpointError(f"state must name a file, and {path} is a folder.")
    writable_folder(path.parent)
    if not path.exists():
        return Progress()
    held = read_json(path)
    if not isinstance(held, dict) or held.get("format") != FORMAT or not isinstance(held.get("search"), dict):
        raise CheckpointError(f"{path} is no state of search_longrope; give another file, or delete it.")
    for name, ours in identity.items():
        theirs = held["search"].get(name)
        if theirs != ours:
            raise CheckpointError(
                f"{path} is the state of another search: its {name} is {theirs!r}, here it is {ours!r}. Give another "
                "file, or delete it."
            )
    try:
        return _progress(held["progress"])
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is no whole state of search_longrope ({error!r}); delete it.") from error


def _progress(held: dict[str, Any]) -> Progress:
    return Progress(
        iteration=int(held["iteration"]),
        population=[Member(_candidate(row[:3]), float(row[3])) for row in held["population"]],
        seen={_candidate(row) for row in held["seen"]},
        seeds={str(name): float(loss) for name, loss in held["seeds"].items()},
        best=[float(loss) for loss in held["best"]],
        evaluations=[int(count) for count in held["evaluations"]],
    )


def _candidate(row: list[Any]) -> Candidate:
    factors, positions, attention = row
    return Candidate(tuple(map(float, factors)), int(positions), float(attention))


def documents_digest(documents: np.ndarray) -> str:
    """Return what tells these documents, token ids [N, L], from others."""
    return hashlib.sha256(f"{documents.shape}".encode() + documents.astype("<i8").tobytes()).hexdigest()[:16]
