"""Checks of a search's settings and of the model before anything is measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_posswap.errors import SchemeError, UnsupportedModelError, UnsupportedSwapError
from hf_posswap.geometry import Geometry
from hf_posswap.patching.plan.plan_swap import plan_swap
from hf_posswap.schemes import Linear
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.scaled import MOST
from hf_posswap.search.candidates import ORIGINAL_POSITIONS, as_candidate

OWNER = "search_longrope"
_MOST_CANDIDATES = 100_000


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


def searched_geometry(model: Any, factor: float) -> Geometry:
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


def searched_positions(model: Any, factor: float, geometry: Geometry, given: Sequence[int] | None) -> tuple[int, ...]:
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


def _stretched(scheme: Any, geometry: Geometry, positions: int) -> Any:
    candidate = as_candidate(scheme, geometry)
    return dataclasses.replace(candidate, original_positions=positions).scheme(scheme.factor, geometry)
