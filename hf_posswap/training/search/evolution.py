"""The evolutionary search of LongRoPE, iteration by iteration, independent of any model.

Ding et al. 2024, https://arxiv.org/abs/2402.13753, algorithm 1 and appendix A: in each of 40 iterations the best 32 of
64 candidates survive, and 16 of their mutations and 16 of their crossovers are added.

The state of a search, its identity and its progress, is saved.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hf_posswap.errors import CheckpointError
from hf_posswap.training.search.candidates import Candidate, SearchSettings, Space
from hf_posswap.utils.atomic_io import read_json, writable_folder, write_text

FORMAT = 1
TRIES = 20
"""Number of attempts to find a new, valid candidate."""


@dataclass(frozen=True)
class Member:
    """A measured candidate, and its mean loss in nats per token."""

    candidate: Candidate
    loss: float


@dataclass
class Progress:
    """The progress of a search.

    Attributes:
        iteration: the last finished iteration; 0: the first population.
        population: the current candidates, best first.
        seen: all measured candidates.
        seeds: loss of each seed.
        best: the best loss after each iteration.
        evaluations: number of measured candidates after each iteration.
    """

    iteration: int = -1
    population: list[Member] = field(default_factory=list)
    seen: set[Candidate] = field(default_factory=set)
    seeds: dict[str, float] = field(default_factory=dict)
    best: list[float] = field(default_factory=list)
    evaluations: list[int] = field(default_factory=list)


def save_progress(path: Path, identity: dict[str, object], progress: Progress) -> None:
    """Write `progress` of the search `identity` to `path` atomically.

    Raises:
        CheckpointError: the file cannot be written.
    """
    data = dataclasses.asdict(progress)
    data["population"] = [[*dataclasses.astuple(m.candidate), m.loss] for m in progress.population]
    data["seen"] = [dataclasses.astuple(candidate) for candidate in sorted(progress.seen, key=dataclasses.astuple)]
    write_text(path, json.dumps({"format": FORMAT, "search": identity, "progress": data}, allow_nan=False) + "\n")


def load_progress(path: Path, identity: dict[str, object]) -> Progress:
    """Return the progress in `path`, or that of a new search if there is no such file.

    Raises:
        CheckpointError: the folder cannot be written, or the file is not a state of this search.
    """
    if path.is_dir():
        raise CheckpointError(f"state must name a file, and {path} is a folder.")
    writable_folder(path.parent)
    if not path.exists():
        return Progress()
    data = read_json(path)
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("search"), dict):
        raise CheckpointError(f"{path} is not a state of search_longrope; give another file, or delete it.")
    for name, expected in identity.items():
        stored = data["search"].get(name)
        if stored != expected:
            raise CheckpointError(
                f"{path} is the state of another search: its {name} is {stored!r}, here it is {expected!r}. Give "
                "another file, or delete it."
            )
    try:
        saved = data["progress"]
        return Progress(
            iteration=int(saved["iteration"]),
            population=[Member(_candidate(row[:3]), float(row[3])) for row in saved["population"]],
            seen={_candidate(row) for row in saved["seen"]},
            seeds={str(name): float(loss) for name, loss in saved["seeds"].items()},
            best=[float(loss) for loss in saved["best"]],
            evaluations=[int(count) for count in saved["evaluations"]],
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is an incomplete state of search_longrope ({error!r}); delete it.") from error


def _candidate(row: list[Any]) -> Candidate:
    factors, positions, attention = row
    return Candidate(tuple(map(float, factors)), int(positions), float(attention))


def documents_digest(documents: np.ndarray) -> str:
    """Return a digest of the documents, token ids [N, L]."""
    return hashlib.sha256(f"{documents.shape}".encode() + documents.astype("<i8").tobytes()).hexdigest()[:16]


@dataclass(eq=False)
class Evolution:
    """A search that resumes from `progress` and updates it.

    The random numbers of an iteration depend only on the seed and its index, so a resumed search ends with the same
    result as an uninterrupted one.

    Attributes:
        space: the search space.
        settings: the sizes and the seed.
        progress: the current state.
        loss: measures a candidate.
    """

    space: Space
    settings: SearchSettings
    progress: Progress
    loss: Callable[[Candidate], float]

    def start(self, seeds: Mapping[str, Candidate]) -> None:
        """Run iteration 0: measure the seeds and their mutations."""
        random, progress = np.random.default_rng((self.settings.seed, 0)), self.progress
        members = [self._measured(candidate) for candidate in seeds.values()]
        progress.seeds = {name: member.loss for name, member in zip(seeds, members, strict=True)}
        parents = list(members)
        for number in range(self.settings.population - len(members)):
            members += self._mutation(parents[number % len(parents)].candidate, random)
        self._close(members)

    def step(self) -> None:
        """Run the next iteration."""
        progress = self.progress
        random = np.random.default_rng((self.settings.seed, progress.iteration + 1))
        parents = progress.population[: self.settings.population // 2]
        members = list(parents)
        for _ in range(self.settings.children):
            members += self._mutation(parents[random.integers(len(parents))].candidate, random)
        for _ in range(self.settings.children):
            first, second = sorted(random.choice(len(parents), 2, replace=False))
            members += self._crossover(parents[first].candidate, parents[second].candidate, random)
        self._close(members)

    def _close(self, members: list[Member]) -> None:
        progress = self.progress
        progress.population = sorted(members, key=lambda member: member.loss)
        progress.iteration += 1
        progress.best.append(progress.population[0].loss)
        progress.evaluations.append(len(progress.seen))

    def _measured(self, candidate: Candidate) -> Member:
        member = Member(candidate, self.loss(candidate))
        self.progress.seen.add(candidate)
        return member

    def _mutation(self, parent: Candidate, random: np.random.Generator) -> list[Member]:
        """Return one measured mutation, or none if no new candidate is found around `parent`."""
        for _ in range(TRIES):
            child = self.space.mutated(parent, random)
            if child not in self.progress.seen:
                return [self._measured(child)]
        return []

    def _crossover(self, first: Candidate, second: Candidate, random: np.random.Generator) -> list[Member]:
        """Return one measured crossover, or, as in the authors' code, a mutation of `first` if none is possible."""
        for _ in range(TRIES):
            child = self.space.crossed(first, second, random)
            if child is not None and child not in self.progress.seen:
                return [self._measured(child)]
        return self._mutation(first, random)
