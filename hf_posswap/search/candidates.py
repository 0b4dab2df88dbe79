"""The search space of LongRoPE: candidates, seeds, mutation and crossover.

Ding et al. 2024, https://arxiv.org/abs/2402.13753, section 3.2, table 4 (the space) and algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hf_posswap.geometry import Geometry
from hf_posswap.schemes import NTK, Linear, LongRope, RotaryScheme, ScaledRotary, Yarn

STEPS = 100
"""Grid steps per unit: divisors are whole hundredths."""
ORIGINAL_POSITIONS = (0, 2, 4, 8, 12, 16, 20, 24, 28, 32, 64, 128, 256)
"""The paper's values of n-hat, without 1, which is equivalent to 0 because position 0 has no rotation."""


@dataclass(frozen=True)
class Candidate:
    """One point of the search space.

    Attributes:
        factors: divisors of the angles, R/2 numbers.
        original_positions: n-hat.
        attention_factor: factor on cos and sin.
    """

    factors: tuple[float, ...]
    original_positions: int
    attention_factor: float

    def scheme(self, factor: float, geometry: Geometry) -> LongRope:
        """Return the resolved scheme for `factor` times the original length."""
        open_scheme = LongRope(
            factor=factor,
            long_factor=self.factors,
            attention_factor=self.attention_factor,
            original_positions=self.original_positions,
        )
        return open_scheme.resolve(geometry, None)


def seed_schemes(factor: float, geometry: Geometry) -> dict[str, ScaledRotary]:
    """Return the schemes that the search starts from, resolved, by name: PI, NTK (from width 4 on) and YaRN.

    Example:
        >>> shape = Geometry(8, 1, 1, head_dim=8, num_layers=1, original_length=16, causal=True)
        >>> list(seed_schemes(4.0, shape))
        ['linear', 'ntk', 'yarn']
    """
    classes: list[type[ScaledRotary]] = [Linear, NTK, Yarn]
    if Linear(factor=factor).resolve(geometry, None).rotary_dim(geometry) < 4:
        classes.remove(NTK)
    return {cls.name: cls(factor=factor).resolve(geometry, None) for cls in classes}


def as_candidate(scheme: ScaledRotary, geometry: Geometry) -> Candidate:
    """Return the candidate equivalent to the resolved `scheme`, with divisors off the grid and its attention factor.

    Example:
        >>> shape = Geometry(8, 1, 1, head_dim=4, num_layers=1, original_length=16, causal=True)
        >>> as_candidate(Linear(factor=4).resolve(shape, None), shape)
        Candidate(factors=(4.0, 4.0), original_positions=0, attention_factor=1.0)
    """
    angles = scheme.angles(geometry)
    divisors = scheme.plain(geometry).double() / angles.inv_freq.double()  # [R/2]
    return Candidate(tuple(divisors.tolist()), 0, angles.attention_factor)


@dataclass(frozen=True)
class Space:
    """The space of mutation and crossover: ascending divisors in [1, 1.25 s], in hundredths.

    Attributes:
        factor: s.
        original_positions: values of n-hat.
        attention_factors: values of the factor on cos and sin.
        rate: probability of each gene to be mutated, or taken from the other parent.
    """

    factor: float
    original_positions: tuple[int, ...]
    attention_factors: tuple[float, ...]
    rate: float

    @property
    def top(self) -> int:
        """The largest divisor, 1.25 s, in hundredths."""
        return int(1.25 * self.factor * STEPS + 1e-6)

    def mutated(self, parent: Candidate, random: np.random.Generator) -> Candidate:
        """Return `parent` on the grid with some genes resampled, each divisor from between its neighbours."""
        genes = np.rint(np.array(parent.factors) * STEPS).clip(STEPS, self.top).astype(int)
        genes = np.maximum.accumulate(genes)
        for i in range(len(genes)):
            if random.random() < self.rate:
                low = genes[i - 1] if i > 0 else STEPS
                high = genes[i + 1] if i + 1 < len(genes) else self.top
                genes[i] = random.integers(low, high, endpoint=True)
        positions, attention = parent.original_positions, parent.attention_factor
        if random.random() < self.rate:
            positions = int(random.choice(self.original_positions))
        if random.random() < self.rate:
            attention = float(random.choice(self.attention_factors))
        return Candidate(tuple((genes / STEPS).tolist()), positions, attention)

    def crossed(self, first: Candidate, second: Candidate, random: np.random.Generator) -> Candidate | None:
        """Return `first` with some genes of `second`, or None if its divisors would not be ascending."""
        from_second = random.random(len(first.factors) + 2) < self.rate
        factors = np.where(from_second[2:], second.factors, first.factors)
        if bool((np.diff(factors) < 0).any()):
            return None
        return Candidate(
            tuple(factors.tolist()),
            second.original_positions if from_second[0] else first.original_positions,
            second.attention_factor if from_second[1] else first.attention_factor,
        )


def attention_choices(factor: float, geometry: Geometry, seeds: Mapping[str, RotaryScheme]) -> tuple[float, ...]:
    """Return the factors on cos and sin to try: those of the resolved seeds, and LongRoPE's."""
    choices = {seed.angles(geometry).attention_factor for seed in seeds.values()}
    pairs = next(iter(seeds.values())).rotary_dim(geometry) // 2
    longrope = LongRope(factor=factor, long_factor=(1.0,) * pairs).resolve(geometry, None)
    return tuple(sorted(choices | {longrope.filled("attention_factor")}))
