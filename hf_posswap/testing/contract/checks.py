"""The comparisons of the contract: each failure says what was expected and what was seen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

NOISE = 5e-5
"""The largest difference that float32 rounding makes of logits near 5."""
CHANGE = 1e-2
"""The smallest difference that counts as a change of mechanism."""


class BrokenPromiseError(AssertionError):
    """A point does not hold.

    Attributes:
        expected: what the promise asks for.
        seen: what the model did.
    """

    def __init__(self, expected: str, seen: str) -> None:
        super().__init__(f"expected {expected}; seen: {seen}")
        self.expected, self.seen = expected, seen


class SkippedPointError(Exception):
    """A point cannot be checked here; says why."""


def gap(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference; NaN counts as infinite.

    Raises:
        BrokenPromiseError: their shapes differ.
    """
    if a.shape != b.shape:
        raise BrokenPromiseError(f"a tensor of shape {tuple(b.shape)}", f"shape {tuple(a.shape)}")
    return float((a.float() - b.float()).abs().nan_to_num(nan=torch.inf).max())


def check(holds: object, expected: str, seen: object) -> None:
    """Raise unless `holds`.

    Raises:
        BrokenPromiseError: it does not hold.
    """
    if not holds:
        raise BrokenPromiseError(expected, str(seen))


def check_same(actual: Tensor, reference: Tensor, within: float = 0.0, meaning: str = "the same logits") -> None:
    """Raise unless the two differ by at most `within`.

    Raises:
        BrokenPromiseError: they differ by more.
    """
    apart = gap(actual, reference)
    bound = "bit for bit" if within == 0 else f"up to {within:.2g}"
    check(apart <= within, f"{meaning} {bound}", f"they differ by {apart:.3g}")


def check_differs(actual: Tensor, reference: Tensor, by: float = CHANGE, meaning: str = "other logits") -> None:
    """Raise unless the two differ by more than `by`.

    Raises:
        BrokenPromiseError: they do not.
    """
    apart = gap(actual, reference)
    check(apart > by, f"{meaning}, by more than {by:.2g}", f"they differ by {apart:.3g}")


def check_finite(actual: Tensor, meaning: str = "finite logits") -> None:
    """Raise unless all numbers are finite.

    Raises:
        BrokenPromiseError: one is not.
    """
    finite = torch.isfinite(actual)
    check(finite.all(), meaning, f"{int((~finite).sum())} of {finite.numel()} numbers are infinite or nan")


@contextmanager
def raises(error: type[BaseException] | tuple[type[BaseException], ...], match: str = "") -> Iterator[None]:
    """Raise unless the block raises an `error` whose message contains the pattern `match`.

    Raises:
        BrokenPromiseError: nothing is raised, or the message differs.
    """
    names = error.__name__ if isinstance(error, type) else " or ".join(each.__name__ for each in error)
    expected = f"{names} that says {match!r}" if match else names
    try:
        yield
    except error as raised:
        check(re.search(match, str(raised)), expected, f"{type(raised).__name__}: {raised}")
    else:
        raise BrokenPromiseError(expected, "nothing is raised")
