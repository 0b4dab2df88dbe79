"""One run of a search, from its saved state to its result."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_posswap.errors import CheckpointError
from hf_posswap.geometry import Geometry
from hf_posswap.search.candidates import Candidate, Space, as_candidate, attention_choices, seed_schemes
from hf_posswap.search.evolution import Evolution
from hf_posswap.search.fitness import scheme_loss
from hf_posswap.search.interrupts import Interrupts
from hf_posswap.search.result import LongRopeSearch
from hf_posswap.search.state import Progress, documents_digest, load_progress, save_progress
from hf_posswap.search.subject import SearchSettings
from hf_posswap.utils.weights_digest import weights_digest

if TYPE_CHECKING:
    from hf_posswap.utils.progress import Reporter, Task


@dataclass(frozen=True)
class Session:
    """A validated search.

    Attributes:
        model: the model to measure.
        documents: token ids [N, L].
        geometry: the model's geometry.
        settings: the settings of the search.
        positions: values of n-hat to try.
        path: file of the state; None: it is not saved.
    """

    model: Any
    documents: np.ndarray
    geometry: Geometry
    settings: SearchSettings
    positions: tuple[int, ...]
    path: Path | None

    def identity(self) -> dict[str, Any]:
        """Return the properties that a saved state must share with the search that resumes from it."""
        settings = dataclasses.asdict(self.settings)
        del settings["iterations"]  # a resumed search may have more
        return {
            "model": weights_digest(self.model),
            "documents": documents_digest(self.documents),
            "original_positions": list(self.positions),
            **settings,
        }

    def progress(self) -> Progress:
        """Return the current progress."""
        if self.path is None:
            return Progress()
        progress = load_progress(self.path, self.identity())
        if progress.iteration > self.settings.iterations:
            raise CheckpointError(
                f"{self.path} is at iteration {progress.iteration}, past the requested {self.settings.iterations}: "
                "give as many or more, or another file."
            )
        return progress

    def run(self, progress: Progress, task: Task, interrupts: Interrupts) -> None:
        """Run the remaining iterations."""
        settings = self.settings
        seeds = seed_schemes(settings.factor, self.geometry)
        attention = attention_choices(settings.factor, self.geometry, seeds)
        space = Space(settings.factor, self.positions, attention, settings.mutation_rate)

        def loss(candidate: Candidate) -> float:
            scheme = candidate.scheme(settings.factor, self.geometry)
            measured = scheme_loss(self.model, scheme, self.documents, interrupts)
            task.advance(self.documents.size, measured)
            return measured

        evolution = Evolution(space, settings, progress, loss)
        identity = None if self.path is None else self.identity()
        while progress.iteration < settings.iterations:
            if progress.iteration < 0:
                evolution.start({name: as_candidate(scheme, self.geometry) for name, scheme in seeds.items()})
            else:
                evolution.step()
            if self.path is not None and identity is not None:
                save_progress(self.path, identity, progress)

    def result(self, progress: Progress) -> LongRopeSearch:
        """Return the result of a finished search."""
        best = progress.population[0]
        return LongRopeSearch(
            scheme=best.candidate.scheme(self.settings.factor, self.geometry),
            perplexity=math.exp(best.loss),
            seeds={name: math.exp(loss) for name, loss in progress.seeds.items()},
            log=tuple(math.exp(loss) for loss in progress.best),
            evaluations=tuple(progress.evaluations),
            length=self.documents.shape[1],
            documents=len(self.documents),
            original_positions=self.positions,
        )


@contextmanager
def progress_bar(total: int, done: int, reporter: Reporter | None) -> Iterator[Task]:
    """Show the progress of `total` evaluations, of which `done` are already finished; without a reporter, nothing."""
    from rich.console import Console

    from hf_posswap.utils.progress import Reporter

    silent = Reporter(Console(file=io.StringIO()))
    with (reporter or silent).task("searching LongRoPE", total) as task:
        task.skip(done)
        yield task
