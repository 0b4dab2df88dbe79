"""What a point of the contract is: a promise in a sentence, a check of it on one pair, and the pairs that it is for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from hf_posswap.testing.contract.pairs import Pair

Wanted = Callable[[Pair], bool]
Check = TypeVar("Check", bound=Callable[..., None])


@dataclass(frozen=True)
class Point:
    """One point of the contract.

    Attributes:
        promise: the promise, a sentence.
        only: conditions on the pairs that it is for.
        parameter: the name of the parameter that the check runs over; "": none.
        values: of the parameter.
        few: whether it asks the same of all schemes which ask for positions alike, so that few of them prove it.
        few_values: the values of the parameter for which that is so.
        refused: whether it is about pairs that are refused.
        of_stock: whether it is about running a model, so that the stock class itself can be asked too.
        ignored: warnings that it may meet, as Python's filters write them.
    """

    promise: str
    only: tuple[Wanted, ...] = ()
    parameter: str = ""
    values: tuple[object, ...] = ()
    few: bool = False
    few_values: tuple[object, ...] = ()
    refused: bool = False
    of_stock: bool = False
    ignored: tuple[str, ...] = ()

    def is_for(self, pair: Pair) -> bool:
        """Return whether the pair, which can be patched, has to keep the promise."""
        return all(condition(pair) for condition in self.only)


def point(*only: Wanted, **options: Any) -> Callable[[Check], Check]:
    """Make a point of a function; the first sentence of its docstring is the promise.

    The function takes a pair, the parameter if there is one, and `tmp_path`, a folder, if it names that.

    Args:
        only: conditions on the pairs that it is for.
        options: the other fields of `Point`.
    """

    def decorate(check: Check) -> Check:
        promise = (inspect.getdoc(check) or "").partition("\n\n")[0].replace("\n", " ")
        check.point = Point(promise, only, **options)  # type: ignore[attr-defined]
        return check

    return decorate


def point_of(check: Callable[..., None]) -> Point:
    """Return the point that `check` is the function of."""
    return check.point  # type: ignore[attr-defined]


def checks_of(module: ModuleType) -> dict[str, Callable[..., None]]:
    """Return the checks of the points that `module` defines, by name, in order."""
    return {name: value for name, value in vars(module).items() if isinstance(getattr(value, "point", None), Point)}


def once(pair: Pair) -> bool:
    """Return whether the pair runs points that ask nothing of the words: an encoder-decoder runs them once."""
    return pair.first


def placed(pair: Pair) -> bool:
    """Return whether the words may be given positions: of the stacks of a model, those that are told."""
    return pair.placed


def not_convolved(pair: Pair) -> bool:
    """Return whether the stock class keeps padding out of what it computes of the words."""
    return not pair.limits.convolves


def cached(pair: Pair) -> bool:
    """Return whether the model takes a cache."""
    return pair.cached
