"""The toys, registered only while a test wants them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hf_posswap.families import FAMILIES
from hf_posswap.schemes import SCHEMES
from tests.toys.house import HOUSE
from tests.toys.window_toll import WindowToll

TOY_SCHEME = WindowToll.name
TOY_MODEL = "house"


def forget() -> None:
    """Take the toys out of the registries."""
    SCHEMES.remove(WindowToll.name)
    FAMILIES.remove(HOUSE.name)


@contextmanager
def registered() -> Iterator[None]:
    """Register the toys inside a `with` block."""
    SCHEMES.add(WindowToll.name, WindowToll)
    FAMILIES.add(HOUSE.name, HOUSE)
    try:
        yield
    finally:
        forget()


forget()  # importing the toys has registered them; other tests must not meet them
