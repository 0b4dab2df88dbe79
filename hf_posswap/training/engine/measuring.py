"""What is measured of a finished model: the loss of held-out documents, or how near an encoder's vectors stayed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hf_posswap.families.locating import locate
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.training.config import Recipe
from hf_posswap.training.data import build_data
from hf_posswap.training.engine.arguments import on_cpu
from hf_posswap.training.engine.evaluating import OF_TOKENS, lengths_of, vector_lengths
from hf_posswap.training.engine.phase import Run
from hf_posswap.training.engine.preparing import load_model


def held_out_loss(recipe: Recipe, run: Run, model: Any) -> dict[str, float | None]:
    """Return the loss at each length of the recipe; None where the model ends before it.

    Where the recipe names no length, that is one (`own_length`); nothing where it cannot be had at little cost: of
    encoders, and of models that one device may not hold.

    Args:
        recipe: as a whole.
        run: that is at its end.
        model: the finished one, loaded again.
    """
    by_itself = not recipe.evaluation.lengths
    if by_itself and (recipe.objective.kind not in OF_TOKENS or run.services.evaluate is None or run.launch.shards):
        return {}
    assert run.services.evaluate is not None
    _, documents = _held_out(recipe, causal=True)
    lengths = lengths_of(recipe, documents)
    if not lengths:
        return {}
    found = run.services.evaluate(_placed(model, recipe), documents, lengths, recipe.evaluation.documents)
    return {str(length): found.get(length) for length in lengths}


def held_out_vectors(recipe: Recipe, run: Run, model: Any, *, reach: int | None) -> list[dict[str, Any]]:
    """Return how near the vectors of an encoder are to those of the model that it began as, a row a length.

    Nothing is said of causal models, and of models that one device may not hold.

    Args:
        recipe: as a whole.
        run: that is at its end.
        model: the finished one, loaded again.
        reach: tokens that it is meant for; None: as many as its base.
    """
    if recipe.objective.kind in OF_TOKENS or run.services.near is None or run.launch.shards:
        return []
    tokenizer, documents = _held_out(recipe, causal=False)
    base, _ = load_model(recipe)
    window = locate(unwrap(base)).geometry.original_length
    read = (*recipe.data.lengths, *(stage.length for stage in recipe.stages if stage.length))
    longest = min(reach or window, max(window, *read))
    lengths = vector_lengths(documents, window, longest, recipe.evaluation.documents)
    long = [document for document in documents if lengths and len(document) >= lengths[-1]]
    if not long:
        return []
    placed = _placed(model, recipe), _placed(base, recipe)
    return run.services.near(*placed, tokenizer, long[: recipe.evaluation.documents], lengths)


def _held_out(recipe: Recipe, *, causal: bool) -> tuple[Any, Sequence[np.ndarray]]:
    """Return the tokenizer, and held-out documents, whole, however training cut them."""
    named, trusted = recipe.model.tokenizer or recipe.model.name, recipe.model.trust_remote_code
    words = load_tokenizer(named, instead="name one as model.tokenizer", trust_remote_code=trusted)
    plain = dataclasses.replace(recipe.data, packing="none", cut=(1,))
    return words, build_data(plain, words, causal=causal, scheme_length=plain.length).held_out


def _placed(model: Any, recipe: Recipe) -> Any:
    return model if on_cpu(recipe) else model.to("cuda" if torch.cuda.is_available() else "mps")
