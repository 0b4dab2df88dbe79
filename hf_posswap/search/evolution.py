"""The evolutionary search of LongRoPE, iteration by iteration, independent of any model.

Ding et al. 2024, https://arxiv.org/abs/2402.13753, algorithm 1 and appendix A: in each of 40 iterations the best 32 of
64 candidates survive, and 16 of their mutations and 16 of their crossovers are added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from hf_posswap.search.candidates import Candidate, Space
from hf_posswap.search.state import Member, Progress
from hf_posswap.search.subject import SearchSettings

TRIES = 20
"""Number of attempts to find a new, valid candidate."""


class Evolution:
    """A search that resumes from `progress` and updates it.

    The random numbers of an iteration depend only on the seed and its index, so a resumed search ends with the same
    result as an uninterrupted one.

    Args:
        space: the search space.
        settings: the sizes and the seed.
        progress: the current state.
        loss: measures a candidate.
    """

    def __init__(
        self, space: Space, settings: SearchSettings, progress: Progress, loss: Callable[[Candidate], float]
    ) -> None:
        self.space, self.settings, self.progress, self.loss = space, settings, progress, loss

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
