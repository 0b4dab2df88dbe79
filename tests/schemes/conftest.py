"""What the scheme tests share: geometries, and one working example of every registered scheme."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from hf_posswap.geometry import Geometry
from hf_posswap.schemes import SCHEMES, Scheme, make_scheme


def _geometry(**changes: Any) -> Geometry:
    """Return a small causal model's geometry, with `changes`."""
    fields: dict[str, Any] = {
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 16,
        "num_layers": 2,
        "original_length": 128,
        "causal": True,
    }
    return Geometry(**fields | changes)


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
    return _geometry


@pytest.fixture(scope="session")
def example() -> Callable[..., Scheme]:
    return _example
