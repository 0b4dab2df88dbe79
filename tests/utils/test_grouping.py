"""Positions in groups: as a floor division by Python gives them, also in code that inductor makes."""

from __future__ import annotations

import pytest
import torch

from hf_posswap.utils.grouping import groups_of


@pytest.mark.parametrize("size", [2, 8, 9, 11, 64, 300])
@pytest.mark.parametrize("first", [-40, 0, 2**24 + 1])
def test_groups_are_those_of_a_division_by_python(size: int, first: int) -> None:
    positions = torch.arange(first, first + 256)
    assert groups_of(positions, size).tolist() == [at // size for at in range(first, first + 256)]


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 9, 11, 64, 300])
def test_compiled_groups_are_those_of_a_division_by_python(size: int) -> None:
    """Inductor cuts the loop of a plain division into groups, and does not write those that are not whole."""
    torch._dynamo.reset()  # else the size would be a symbol
    run = torch.compile(lambda: groups_of(torch.arange(256), size), fullgraph=True)
    run()
    for left in [torch.full((256,), -1) for _ in range(64)]:
        del left  # what is not written holds this
    assert run().tolist() == [at // size for at in range(256)]
