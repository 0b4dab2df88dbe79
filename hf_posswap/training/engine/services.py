"""The evaluation and the output of the engine: functions that it is given, and the lengths at which it measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_posswap.training.config import Recipe
from hf_posswap.utils.progress import Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Evaluate = Callable[..., dict[int, float]]
"""From a model, held-out documents, lengths and the most documents to read, to the loss per token at each length.

If the loss counts only some tokens, `counted` says for each document, bool [its tokens], which ones.
"""
LEAST_TOKENS = 2
"""Least tokens of a document that have a loss."""
_LEAST_TEXT = 16
"""Least tokens, with special ones, at which a vector is worth comparing."""


@dataclass(frozen=True)
class Services:
    """Functions for the engine.

    Attributes:
        evaluate: measures a model; None: a recipe that needs it is refused, and the report goes without its numbers.
        free_bytes: returns the free memory of a device; None: memory is not checked.
        reporter: shows lines and bars on the main process; None: nothing is shown.
    """

    evaluate: Evaluate | None = None
    free_bytes: Callable[[torch.device], int | None] | None = None
    reporter: Reporter | None = None


def lengths_of(recipe: Recipe, documents: Sequence[np.ndarray], *, whole: bool = False) -> tuple[int, ...]:
    """Return the lengths at which to evaluate held-out `documents`: the recipe's, or one length that they have.

    Args:
        recipe: as a whole.
        documents: token ids of each.
        whole: whether documents that are shorter than a length are evaluated too, as whole.
    """
    if recipe.evaluation.lengths:
        return recipe.evaluation.lengths
    if whole:
        length = min(recipe.data.length, max(map(len, documents), default=0))
    else:
        length = own_length(documents, recipe.data.length, recipe.evaluation.documents)
    return (length,) if length >= LEAST_TOKENS else ()


def measure_of(
    recipe: Recipe,
    services: Services,
    model: PreTrainedModel,
    documents: Sequence[np.ndarray],
    counted: Sequence[np.ndarray] | None,
) -> Callable[[], dict[int, float]]:
    """Return a function that measures `model` on held-out `documents` by the recipe's settings.

    Args:
        recipe: without stages.
        services: with the function that measures.
        model: to measure.
        documents: token ids of each.
        counted: whether the loss counts each token; None: it counts all.
    """
    evaluate, lengths = services.evaluate, lengths_of(recipe, documents, whole=counted is not None)
    assert evaluate is not None
    flags = {} if counted is None else {"counted": counted}
    return lambda: evaluate(model, documents, lengths, recipe.evaluation.documents, **flags) if lengths else {}


def vector_lengths(documents: Sequence[object], window: int, longest: int, most: int) -> tuple[int, ...]:
    """Return the lengths at which an encoder's vectors are compared with its base's.

    The base's window, its doublings, and the longest length that half of the evaluated documents have.

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
    limit = own_length(documents, longest, most)
    if limit < _LEAST_TEXT:
        return ()
    doublings = (window << number for number in range(limit.bit_length()))
    return tuple(sorted({limit, *(length for length in doublings if length < limit)}))


def own_length(documents: Sequence[Any], wanted: int, most: int) -> int:
    """Return the default length at which held-out documents are evaluated.

    `wanted`, or less if fewer than half of the evaluated documents are that long: one long document is a weak sample.

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
