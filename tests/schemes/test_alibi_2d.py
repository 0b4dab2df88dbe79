"""The penalty on the distance of patches, against one computed pair by pair."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_posswap.schemes import Alibi2D
from hf_posswap.schemes.common.table import places_of
from tests.schemes.small import image_geometry


@settings(max_examples=20, deadline=None)
@given(grid=st.tuples(st.integers(1, 5), st.integers(1, 5)), prefix=st.integers(0, 2), heads=st.sampled_from([2, 4, 8]))
def test_the_bias_equals_the_formula_pair_by_pair(grid: tuple[int, int], prefix: int, heads: int) -> None:
    places = places_of(grid, prefix, torch.device("cpu"))
    found = Alibi2D().mechanism(image_geometry(num_heads=heads)).bias(places, places)[0]
    spots = [None] * prefix + [(r, c) for r in range(grid[0]) for c in range(grid[1])]
    for head in range(heads):
        slope = 2 ** (-8 * (head + 1) / heads)
        for q, one in enumerate(spots):
            for k, other in enumerate(spots):
                far = 0.0 if one is None or other is None else math.dist(one, other)
                assert math.isclose(float(found[head, q, k]), -slope * far, abs_tol=1e-5)


def test_it_is_the_same_for_all_shifts_of_an_image() -> None:
    places = places_of((3, 4), 1, torch.device("cpu"))
    mechanism = Alibi2D().mechanism(image_geometry())
    shifted = torch.where(places < 0, places, places + 7 * 2**16 + 5)
    assert torch.equal(mechanism.bias(places, places), mechanism.bias(shifted, shifted))
