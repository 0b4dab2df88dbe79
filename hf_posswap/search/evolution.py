"""The evolutionary search of LongRoPE, iteration by iteration; it knows candidates and losses, and no model.

Ding et al. 2024, https://arxiv.org/abs/2402.13753, algorithm 1 and appendix A: of 64 candidates the best 32 live on, 16
mutations and 16 crossovers of theirs join them, 40 times over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from hf_posswap.search.candidates import Candidate, Space
from hf_posswap.search.state import Member, Progress
from hf_posswap.search.subject import SearchSettings

TRIES = 20
"""How often a candidate that was met before, or falls, is tried anew."""


class Evolution:
    """A search that goes on from `progress` and keeps it up to date.

    What an iteration draws depends on the seed and its number alone, so that a search that goes on where it stopped
    ends where an unbroken one does.

    Args:
        space: to search.
        settings: the sizes and the seed.
        progress: where it stands.
        loss: measures a candidate.
    """

    def __init__(
        self, space: Space, settings: SearchSettings, progress: Progress, loss: Callable[[Candidate], float]
    ) -> None:
        self.space, self.settings, self.progress, self.loss = space, settings, progress, loss

    def start(self, seeds: Mapping[str, Candidate]) -> None:
        """Measure the seeds and mutations of theirs: iteration 0."""
        random, progress = np.random.default_rng((self.settings.seed, 0)), self.progress
        members = [self._measured(candidate) for candidate in seeds.values()]
        progress.seeds = {name: member.loss for name, member in zip(seeds, members, strict=True)}
        parents = list(members)
        for turn in range(self.settings.population - len(members)):
            members += self._mutation(parents[turn % len(parents)].candidate, random)
        self._close(members)

    def step(self) -> None:
        """Carry out the next iteration."""
        progress = self.progress
        random = np.random.default_rng((self.settings.seed, progress.iteration + 1))
        parents = progress.population[: self.settings.population // 2]
        members = list(parents)
        for _ in range(self.settings.children):
            members += self._mutation(parents[random.integers(len(parents))].candidate, random)
        for _ in range(self.settings.children):
            one, other = sorted(random.choice(len(parents), 2, replace=False))
            members += self._crossover(parents[one].candidate, parents[other].candidate, random)
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
        """Return one measured mutation, or none where the space around `parent` is used up."""
        for _ in range(TRIES):
            child = self.space.mutated(parent, random)
            if child not in self.progress.seen:
                return [self._measured(child)]
        return []

    def _crossover(self, one: Candidate, other: Candidate, random: np.random.Generator) -> list[Member]:
        """Return one measured crossover, or a mutation of `one` where none is possible, as the authors' code has it."""
        for _ in range(TRIES):
            child = self.space.crossed(one, other, random)
            if child is not None and child not in self.progress.seen:
                return [self._measured(child)]
        return self._mutation(one, random)
