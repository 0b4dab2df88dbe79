"""The toys, registered only while a test wants them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hf_posswap.families import FAMILIES
from hf_posswap.schemes import SCHEMES
from tests.toys.bert_generation import BERT_GENERATION
from tests.toys.window_toll import WindowToll

TOY_SCHEME = WindowToll.name
TOY_MODEL = "bert-generation"


def forget() -> None:
    """Take the toys out of the registries."""
    SCHEMES.remove(WindowToll.name)
    FAMILIES.remove(BERT_GENERATION.name)


@contextmanager
def registered() -> Iterator[None]:
    """Register the toys inside a `with` block."""
    SCHEMES.add(WindowToll.name, WindowToll)
    FAMILIES.add(BERT_GENERATION.name, BERT_GENERATION)
    try:
        yield
    finally:
        forget()


forget()  # importing the toys has registered them; other tests must not meet them
