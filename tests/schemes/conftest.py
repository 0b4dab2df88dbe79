"""What the scheme tests share: geometries, and one working example of every registered scheme."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from hf_posswap.geometry import Geometry
from hf_posswap.schemes import SCHEMES, Scheme, make_scheme
from tests.schemes import small


def _example(name: str, geometry: Geometry, factor: float = 4.0) -> Scheme:
    """Return the scheme called `name`, unresolved, with whatever options it cannot do without."""
    fields = {field.name for field in dataclasses.fields(SCHEMES.get(name))}
    options = SCHEMES.get(name).stand_ins(geometry)
    if "factor" in fields:
        options["factor"] = factor
    if "init_std" in fields:  # at zero it would be no mechanism yet
        options["init_std"] = 1.0
    return make_scheme(name, **options)


@pytest.fixture(scope="session")
def geometry() -> Callable[..., Geometry]:
    return small.geometry


@pytest.fixture(scope="session")
def example() -> Callable[..., Scheme]:
    return _example
