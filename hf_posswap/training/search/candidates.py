"""The search space of LongRoPE: candidates, seeds, mutation and crossover.

Ding et al. 2024, https://arxiv.org/abs/2402.13753, section 3.2, table 4 (the space) and algorithm 1.

A search's settings and the model are checked before anything is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_posswap.errors import SchemeError, UnsupportedModelError, UnsupportedSwapError
from hf_posswap.geometry import Geometry
from hf_posswap.patching.plan.plan_swap import plan_swap
from hf_posswap.schemes import NTK, Linear, LongRope, RotaryScheme, ScaledRotary, Yarn
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.scaled import MOST

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_posswap.schemes.base import Scheme

STEPS = 100
"""Grid steps per unit: divisors are whole hundredths."""
ORIGINAL_POSITIONS = (0, 2, 4, 8, 12, 16, 20, 24, 28, 32, 64, 128, 256)
"""The paper's values of n-hat, without 1, which is equivalent to 0 because position 0 has no rotation."""
OWNER = "search_longrope"
_MOST_CANDIDATES = 100_000


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


@dataclass(frozen=True)
class SearchSettings:
    """The settings of a search; see `search_longrope`.

    Raises:
        SchemeError: a value is invalid.

    Example:
        >>> SearchSettings(factor=4, population=64, iterations=40, mutation_rate=0.3, seed=0).evaluations
        1344
    """

    factor: float
    population: int
    iterations: int
    mutation_rate: float
    seed: int

    def __post_init__(self) -> None:
        checked = checks.number(OWNER, "factor", self.factor, above=1.0, maximum=MOST)
        object.__setattr__(self, "factor", checked)
        checks.whole(OWNER, "population", self.population, minimum=8, maximum=_MOST_CANDIDATES)
        checks.whole(OWNER, "iterations", self.iterations, minimum=1, maximum=_MOST_CANDIDATES)
        checked = checks.number(OWNER, "mutation_rate", self.mutation_rate, above=0.0, maximum=1.0)
        object.__setattr__(self, "mutation_rate", checked)
        checks.whole(OWNER, "seed", self.seed, minimum=0, maximum=checks.LARGEST_SEED)

    @property
    def children(self) -> int:
        """Number of mutations, and of crossovers, per iteration."""
        return self.population // 4

    @property
    def evaluations(self) -> int:
        """Maximum number of measured candidates."""
        return self.population + 2 * self.children * self.iterations


def searched_geometry(model: PreTrainedModel, factor: float) -> Geometry:
    """Return the geometry of `model`, whose rotary angles can be searched for `factor` times its length.

    Raises:
        UnsupportedModelError: no family describes it, or its weights are on meta.
        UnsupportedSwapError: it is not rotary, or not causal, or no LongRoPE can be put in it.
        AlreadyPatchedError: it carries a swap.
    """
    plan = plan_swap(model, Linear(factor=factor))
    name = type(model).__name__
    if not plan.sites.rotary:
        raise UnsupportedSwapError(
            f"{OWNER} stretches the angles of a rotary model, and {name} has a position table: "
            "patch_model(model, 'learned', ...) extends that."
        )
    if not plan.sites.geometry.causal:
        raise UnsupportedSwapError(f"{OWNER} measures the loss of the next token, and {name} is not causal.")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UnsupportedModelError(f"{OWNER} runs the model, and its weights are on meta: load it with its weights.")
    plan_swap(model, _stretched(plan.scheme, plan.sites.geometry, positions=0))
    return plan.sites.geometry


def searched_positions(
    model: PreTrainedModel, factor: float, geometry: Geometry, given: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the values of n-hat to try, ascending: `given`, or those of the paper below the original length.

    Raises:
        SchemeError: `given` is empty, or a value is not a number of positions below the target length.
        UnsupportedSwapError: a value is above 0, and the model cannot be patched inside attention.
    """
    target = target_length(factor, geometry)
    if given is not None:
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:
            raise SchemeError(f"{OWNER}: original_positions must be a list of whole numbers, got {given!r}.")
        for index, value in enumerate(given):
            checks.whole(OWNER, f"original_positions[{index}]", value, minimum=0, maximum=target - 1)
        if max(given) > 0:
            plan_swap(model, _stretched(Linear(factor=factor).resolve(geometry, None), geometry, max(given)))
        return tuple(sorted(set(given)))
    chosen = tuple(value for value in ORIGINAL_POSITIONS if value < geometry.original_length)
    try:
        plan_swap(model, _stretched(Linear(factor=factor).resolve(geometry, None), geometry, max(chosen)))
    except UnsupportedSwapError:
        return (0,)
    return chosen


def target_length(factor: float, geometry: Geometry) -> int:
    """Return s L in whole tokens.

    Raises:
        SchemeError: it is less than L + 2, too short to distinguish candidates.
    """
    length = Linear(factor=factor).resolve(geometry, None).reach(geometry)
    assert length is not None
    if length < geometry.original_length + 2:  # the forward reads all tokens but the last
        raise SchemeError(
            f"{OWNER}: factor {factor:g} takes the original {geometry.original_length} tokens to {length}; at least "
            "two more are needed to see a difference."
        )
    return length


def _stretched(scheme: Any, geometry: Geometry, positions: int) -> Scheme:
    candidate = as_candidate(scheme, geometry)
    return dataclasses.replace(candidate, original_positions=positions).scheme(scheme.factor, geometry)
