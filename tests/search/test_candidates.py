"""The space of the search: seeds that are the real schemes, children that keep the paper's constraints."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from hf_posswap.geometry import Geometry
from hf_posswap.schemes import NTK, Linear, Yarn
from hf_posswap.training.search.candidates import (
    Candidate,
    SearchSettings,
    Space,
    as_candidate,
    attention_choices,
    seed_schemes,
)
from hf_posswap.training.search.evolution import Evolution, Progress

WIDTHS = st.sampled_from([4, 8, 20, 64, 128])
FACTORS = st.sampled_from([1.01, 1.5, 2.0, 4.0, 7.3, 32.0])


def shape(width: int, original: int = 256) -> Geometry:
    return Geometry(
        hidden_size=width,
        num_heads=1,
        num_kv_heads=1,
        head_dim=width,
        num_layers=1,
        original_length=original,
        causal=True,
        base=10000.0,
    )


@given(width=WIDTHS, factor=FACTORS, original=st.sampled_from([64, 512, 4096]))
def test_a_seed_turns_pairs_as_the_scheme_that_it_stands_for(width: int, factor: float, original: int) -> None:
    geometry = shape(width, original)
    for cls in (Linear, NTK, Yarn):
        expected = cls(factor=factor).resolve(geometry, None).angles(geometry)
        seed = as_candidate(seed_schemes(factor, geometry)[cls.name], geometry)
        found = seed.scheme(factor, geometry).angles(geometry, torch.tensor([original + 1]))
        torch.testing.assert_close(found.inv_freq, expected.inv_freq, rtol=3e-7, atol=0)
        assert found.attention_factor == expected.attention_factor
        assert found.attention_factor in attention_choices(factor, geometry, seed_schemes(factor, geometry))
        assert all(
            0.999999 <= low <= high * 1.000001 for low, high in zip(seed.factors, seed.factors[1:], strict=False)
        )
        assert seed.factors[-1] <= 1.25 * factor


def test_a_width_of_one_pair_has_no_ntk() -> None:
    assert list(seed_schemes(4.0, shape(2))) == ["linear", "yarn"]


@given(width=WIDTHS, factor=FACTORS, seed=st.integers(0, 10**6), rate=st.sampled_from([0.05, 0.3, 1.0]))
def test_mutations_rise_stay_in_bounds_and_lie_on_the_grid(width: int, factor: float, seed: int, rate: float) -> None:
    geometry = shape(width)
    space = Space(factor, (0, 4, 8), (1.0, 1.25), rate)
    random = np.random.default_rng(seed)
    child = as_candidate(seed_schemes(factor, geometry)["yarn"], geometry)
    child = dataclasses.replace(child, attention_factor=1.0)
    for _ in range(5):
        child = space.mutated(child, random)
        assert len(child.factors) == width // 2
        assert list(child.factors) == sorted(child.factors)
        assert child.factors[0] >= 1.0
        assert child.factors[-1] <= 1.25 * factor
        assert all(round(100 * f) / 100 == f for f in child.factors)
        assert child.original_positions in (0, 4, 8)
        assert child.attention_factor in (1.0, 1.25)


def test_a_mutation_can_reach_both_ends_and_every_choice() -> None:
    space, random = Space(2.0, (0, 4), (1.0, 1.5), 1.0), np.random.default_rng(0)
    children = [space.mutated(Candidate((1.5,), 0, 1.0), random) for _ in range(3000)]
    assert {c.factors[0] for c in children} == {k / 100 for k in range(100, 251)}
    assert {(c.original_positions, c.attention_factor) for c in children} == {(0, 1.0), (0, 1.5), (4, 1.0), (4, 1.5)}


@given(data=st.data(), pairs=st.integers(1, 12), seed=st.integers(0, 10**6))
def test_a_crossover_takes_each_gene_from_a_parent_and_rises(data: Any, pairs: int, seed: int) -> None:
    divisors = st.lists(st.sampled_from([1.0, 1.2, 1.7, 2.0]), min_size=pairs, max_size=pairs).map(sorted).map(tuple)
    one = Candidate(data.draw(divisors), 0, 1.0)
    other = Candidate(data.draw(divisors), 4, 1.5)
    child = Space(4.0, (0, 4), (1.0, 1.5), 0.5).crossed(one, other, np.random.default_rng(seed))
    assume(child is not None)
    assert child is not None
    assert list(child.factors) == sorted(child.factors)
    assert all(f in (a, b) for f, a, b in zip(child.factors, one.factors, other.factors, strict=True))
    assert child.original_positions in (0, 4)
    assert child.attention_factor in (1.0, 1.5)


def test_a_crossover_that_would_fall_is_none() -> None:
    space, random = Space(4.0, (0,), (1.0,), 0.5), np.random.default_rng(0)
    low, high = Candidate((1.0, 1.0), 0, 1.0), Candidate((2.0, 2.0), 0, 1.0)
    children = [space.crossed(low, high, random) for _ in range(100)]
    assert {c.factors if c else None for c in children} == {None, (1.0, 1.0), (1.0, 2.0), (2.0, 2.0)}


def evolved(loss: Any, iterations: int, seed: int = 0, population: int = 64) -> Progress:
    """Return a search for the least `loss` among 16 divisors for factor 4."""
    geometry, progress = shape(32), Progress()
    settings = SearchSettings(4.0, population, iterations, 0.3, seed)
    evolution = Evolution(Space(4.0, (0, 4, 8), (1.0, 1.25), 0.3), settings, progress, loss)
    evolution.start({name: as_candidate(s, geometry) for name, s in seed_schemes(4.0, geometry).items()})
    while progress.iteration < iterations:
        evolution.step()
    return progress


def distance(candidate: Candidate) -> float:
    """Return how far a candidate is from one that was hidden in the space."""
    hidden = np.linspace(1.0, 4.5, 16) ** 0.8
    return float(((np.array(candidate.factors) - hidden) ** 2).mean()) + 0.1 * abs(candidate.original_positions - 4)


def test_it_comes_near_a_hidden_optimum_and_beats_chance() -> None:
    progress = evolved(distance, iterations=40)
    assert progress.population[0].candidate.original_positions == 4
    best = progress.best[-1]
    assert best < 0.1 * min(progress.seeds.values())
    random = np.random.default_rng(0)
    by_chance = min(
        distance(Candidate(tuple(np.sort(random.uniform(1, 5, 16))), 4, 1.0)) for _ in range(progress.evaluations[-1])
    )
    assert best < by_chance


def test_no_candidate_is_measured_twice_and_the_best_never_gets_worse() -> None:
    measured: list[Candidate] = []

    def loss(candidate: Candidate) -> float:
        measured.append(candidate)
        return distance(candidate)

    progress = evolved(loss, iterations=10, population=32)
    assert len(measured) == len(set(measured)) == progress.evaluations[-1] == 32 + 10 * 16
    assert progress.best == sorted(progress.best, reverse=True)
    assert progress.best[-1] == min(map(distance, measured))


def test_half_of_the_population_lives_on() -> None:
    progress = evolved(distance, iterations=1, population=32)
    before = evolved(distance, iterations=1, population=32)
    assert [m.loss for m in progress.population] == [m.loss for m in before.population]  # the seed decides all
    assert len(progress.population) == 16 + 8 + 8
    assert evolved(distance, iterations=1, seed=1, population=32).best != progress.best


@pytest.mark.parametrize("population", [8, 9, 64])
def test_the_announced_number_of_evaluations_is_kept(population: int) -> None:
    settings = SearchSettings(4.0, population, 3, 0.3, 0)
    assert evolved(distance, iterations=3, population=population).evaluations[-1] == settings.evaluations
