"""The points of `hf_posswap.testing.contract` as tests: this repository runs them on many more models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from hf_posswap.testing.contract.point import Point, checks_of, point_of

Check = Callable[..., None]


def as_tests(module: ModuleType) -> dict[str, Check]:
    """Return the checks of the points of `module` as tests, by name, with the marks that their points ask for."""
    return {f"test_{name}": _as_test(check) for name, check in checks_of(module).items()}


def _as_test(check: Check) -> Check:
    for mark in _marks(point_of(check)):
        check = mark(check)
    return check


def _marks(point: Point) -> Iterator[Any]:
    for condition in point.only:
        yield pytest.mark.pairs.with_args(condition)
    if point.parameter:
        few = [pytest.param(value, marks=pytest.mark.few) for value in point.few_values]
        values = [few[point.few_values.index(v)] if v in point.few_values else v for v in point.values]
        yield pytest.mark.parametrize(point.parameter, values)
    if point.few:
        yield pytest.mark.few
    for warning in point.ignored:
        yield pytest.mark.filterwarnings(warning)
