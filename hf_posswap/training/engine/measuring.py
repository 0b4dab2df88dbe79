"""Measures a finished model: its loss on held-out documents, or how similar an encoder's vectors are to its base's."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from hf_posswap.families.locating import locate
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.training.config import Recipe
from hf_posswap.training.data import TokenData, build_data
from hf_posswap.training.engine.arguments import on_cpu
from hf_posswap.training.engine.evaluating import lengths_of, measure_of, vector_lengths
from hf_posswap.training.engine.phase import Run
from hf_posswap.training.engine.preparing import load_model, load_recipe_tokenizer


def held_out_loss(recipe: Recipe, run: Run, model: Any) -> dict[str, float | None]:
    """Return the loss at each length of the recipe; None for a length beyond the model's.

    Without lengths in the recipe, one is chosen (`own_length`), but encoders and sharded models are not measured.

    Args:
        recipe: as a whole.
        run: the run to finish.
        model: the finished model, reloaded.
    """
    is_default = not recipe.evaluation.lengths
    if is_default and (not recipe.objective.predicts_next_token or run.services.evaluate is None or run.launch.shards):
        return {}
    assert run.services.evaluate is not None
    _, data = _held_out(recipe, causal=True)
    lengths = lengths_of(recipe, data.held_out, whole=data.held_out_counted is not None)
    if not lengths:
        return {}
    measure = measure_of(recipe, run.services, _on_device(model, recipe), data.held_out, data.held_out_counted)
    loss_by_length = measure()
    return {str(length): loss_by_length.get(length) for length in lengths}


def kept_of_base(recipe: Recipe, run: Run, model: Any, tokens: int) -> dict[str, Any] | None:
    """Return how much of the base a distilled model keeps in the base's window; None: that is not measured.

    "kept" is exp(the base's loss less the model's), the base's perplexity divided by the model's: the share of the
    base's probability of the next token, as the geometric mean. Sharded models are not measured.

    Args:
        recipe: as a whole.
        run: the run to finish.
        model: the finished model, reloaded.
        tokens: that it was trained on.
    """
    if recipe.objective.kind != "distill" or run.services.evaluate is None or run.launch.shards:
        return None
    _, data = _held_out(recipe, causal=True)
    documents, counted, base = data.held_out, data.held_out_counted, load_model(recipe)
    window = locate(unwrap(base)).geometry.original_length
    inside = dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, length=min(window, recipe.data.length), cut=(1,)),
        evaluation=dataclasses.replace(recipe.evaluation, lengths=()),
    )
    losses_by_model = []
    for each in (base, model):
        losses_by_model.append(measure_of(inside, run.services, _on_device(each, recipe), documents, counted)())
    if not losses_by_model[0] or losses_by_model[0].keys() != losses_by_model[1].keys():
        return None
    ((length, before),), ((_, after),) = (losses.items() for losses in losses_by_model)
    if counted is None:
        read = sum(len(document) >= length for document in documents)
    else:
        read = sum(bool(flags[1:length].any()) for flags in counted)
    loss = {"base": before, "nll": after, "kept": math.exp(before - after)}
    return {"length": length, "documents": min(read, recipe.evaluation.documents), "tokens": tokens} | loss


def held_out_vectors(recipe: Recipe, run: Run, model: Any, *, reach: int | None) -> list[dict[str, Any]]:
    """Return the similarity of an encoder's vectors to those of its base, a row per length.

    Causal and sharded models are not measured.

    Args:
        recipe: as a whole.
        run: the run to finish.
        model: the finished model, reloaded.
        reach: tokens that it is meant for; None: those of its base.
    """
    if recipe.objective.predicts_next_token or run.services.near is None or run.launch.shards:
        return []
    tokenizer, data = _held_out(recipe, causal=False)
    documents = data.held_out
    base = load_model(recipe)
    window = locate(unwrap(base)).geometry.original_length
    trained_lengths = (*recipe.data.lengths, *(stage.length for stage in recipe.stages if stage.length))
    longest = min(reach or window, max(window, *trained_lengths))
    lengths = vector_lengths(documents, window, longest, recipe.evaluation.documents)
    long = [document for document in documents if lengths and len(document) >= lengths[-1]]
    if not long:
        return []
    placed = _on_device(model, recipe), _on_device(base, recipe)
    return run.services.near(*placed, tokenizer, long[: recipe.evaluation.documents], lengths)


def _held_out(recipe: Recipe, *, causal: bool) -> tuple[Any, TokenData]:
    """Return the tokenizer, and data with the held-out documents, uncut."""
    tokenizer = load_recipe_tokenizer(recipe)
    plain = dataclasses.replace(recipe.data, packing="none", separator=None, cut=(1,))
    return tokenizer, build_data(plain, tokenizer, causal=causal, scheme_length=plain.length)


def _on_device(model: Any, recipe: Recipe) -> Any:
    return model if on_cpu(recipe) else model.to("cuda" if torch.cuda.is_available() else "mps")
