"""Splits a recipe of several stages into recipes of one stage each, to run in order."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hf_posswap.training.config.reading import merge
from hf_posswap.training.config.scheme_texts import scheme_mapping
from hf_posswap.training.config.settings import Recipe, SchemeValue, StageSettings


@dataclass(frozen=True)
class Phase:
    """A section of a training with one length, one scheme and one schedule.

    Attributes:
        name: of its folder; "" if there is only one phase.
        recipe: without stages.
        stage: when to advance; None if there is only one phase.
    """

    name: str
    recipe: Recipe
    stage: StageSettings | None = None


def phases_of(recipe: Recipe) -> list[Phase]:
    """Return the phases of `recipe`, in order.

    Example:
        >>> from hf_posswap.training.config.settings import SwapSettings
        >>> stages = (StageSettings(max_steps=5, length=64), StageSettings(max_steps=3, scheme={"base": 5e5}))
        >>> for phase in phases_of(Recipe(swap=SwapSettings({"name": "rope", "base": 1e5}), stages=stages)):
        ...     print(phase.name, phase.recipe.training.max_steps, phase.recipe.data.length, phase.recipe.swap.scheme)
        stage-1 5 64 {'name': 'rope', 'base': 100000.0}
        stage-2 3 512 {'name': 'rope', 'base': 500000.0}
    """
    if not recipe.stages:
        return [Phase("", recipe)]
    numbered = enumerate(recipe.stages, 1)
    return [Phase(f"stage-{number}", _single_stage_recipe(recipe, stage), stage) for number, stage in numbered]


def _single_stage_recipe(recipe: Recipe, stage: StageSettings) -> Recipe:
    swap = dataclasses.replace(
        recipe.swap, scheme=scheme_of(recipe, stage), max_length=stage.max_length or recipe.swap.max_length
    )
    training = dataclasses.replace(
        recipe.training,
        max_steps=stage.max_steps,
        warmup_steps=min(recipe.training.warmup_steps, stage.max_steps),
        learning_rate=stage.learning_rate or recipe.training.learning_rate,
    )
    data = dataclasses.replace(recipe.data, length=stage.length or recipe.data.length)
    return dataclasses.replace(recipe, swap=swap, training=training, data=data, stages=())


def scheme_of(recipe: Recipe, stage: StageSettings) -> SchemeValue:
    """Return the scheme of a stage: the recipe's, with the fields that the stage gives, or a different scheme."""
    if stage.scheme is None:
        return recipe.swap.scheme
    below, above = scheme_mapping(recipe.swap.scheme), scheme_mapping(stage.scheme)
    return merge({"scheme": below}, {"scheme": above})["scheme"]
