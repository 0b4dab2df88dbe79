"""Which held-out documents are read, and how far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hf_posswap.training.config import Recipe
from hf_posswap.training.engine.services import Services

OF_TOKENS = ("next-token", "distill")
"""Objectives of models whose held-out loss a token is measured."""
_LEAST_TOKENS = 2
_LEAST_TEXT = 16
"""Tokens below which a vector says little of a text, special ones included."""


def lengths_of(recipe: Recipe, documents: Sequence[np.ndarray]) -> tuple[int, ...]:
    """Return the tokens to read of held-out `documents`: as the recipe says, or one length that they have; () none."""
    if recipe.evaluation.lengths:
        return recipe.evaluation.lengths
    found = own_length(documents, recipe.data.length, recipe.evaluation.documents)
    return (found,) if found >= _LEAST_TOKENS else ()


def measure_of(
    recipe: Recipe, services: Services, model: Any, documents: Sequence[np.ndarray]
) -> Callable[[], dict[int, float]]:
    """Return what measures `model` on held-out `documents` as the recipe says."""
    evaluate, lengths = services.evaluate, lengths_of(recipe, documents)
    assert evaluate is not None
    return lambda: evaluate(model, documents, lengths, recipe.evaluation.documents) if lengths else {}


def vector_lengths(documents: Sequence[Any], window: int, longest: int, most: int) -> tuple[int, ...]:
    """Return the tokens of held-out documents at which an encoder's vectors are held against its base's.

    The base's window, doublings of it, and the longest: as far as half of the documents that would be read have.

    Args:
        documents: token ids of each.
        window: tokens that the base reads.
        longest: tokens that the model is meant for, or that training has read.
        most: documents to read.

    Example:
        >>> texts = [range(900), range(700), range(5)]
        >>> vector_lengths(texts, 128, 600, 16), vector_lengths(texts[2:], 64, 64, 2)
        ((128, 256, 512, 600), ())
    """
    end = own_length(documents, longest, most)
    if end < _LEAST_TEXT:
        return ()
    doubled = (window << number for number in range(end.bit_length()))
    return tuple(sorted({end, *(length for length in doubled if length < end)}))


def own_length(documents: Sequence[Any], wanted: int, most: int) -> int:
    """Return the tokens of held-out documents to read where a recipe does not say it.

    As many as are wanted, or as half of the documents that would be read have: the loss of one long document would say
    little.

    Args:
        documents: token ids of each.
        wanted: tokens of a window in training.
        most: documents to read.

    Example:
        >>> documents = [range(900), range(300), range(200), range(5)]
        >>> own_length(documents, 128, 16), own_length(documents, 512, 16), own_length([], 512, 16)
        (128, 300, 0)
    """
    lengths = sorted(map(len, documents), reverse=True)
    half = max(1, min(most, len(lengths)) // 2)
    return min(wanted, lengths[half - 1]) if lengths else 0
