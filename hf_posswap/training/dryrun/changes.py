"""Changes that reduce a training's memory, the least intrusive first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posswap.training.config import Recipe
from hf_posswap.training.config.shipped import shipped_recipe
from hf_posswap.training.dryrun.launching import count_and_sharding

_FSDP = "accelerate/fsdp2"
_GPUS = (2, 4, 8, 16, 32, 64)
_CHUNK = 1024


@dataclass(frozen=True)
class Change:
    """A training that needs less memory.

    Attributes:
        said: the command-line options of the change.
        recipe: with the change.
        accelerate: the file of its launch.
        processes: GPUs.
    """

    said: str
    recipe: Recipe
    accelerate: Path | None
    processes: int | None


def ladders(recipe: Recipe, accelerate: Path | None, processes: int | None) -> Iterator[list[Change]]:
    """Yield lists of changes that may make `recipe` fit; in each list, every change needs less memory than the last.

    The first list leaves the result unchanged: fewer logits at once, smaller batches with more accumulation, activation
    checkpointing. The second shards weights over GPUs; the third trains adapters instead of all weights. If weights are
    sharded already, a list without smaller batches comes first: FSDP2 keeps unsharded gradients during accumulation.

    Args:
        recipe: that does not fit.
        accelerate: the file of its launch.
        processes: GPUs.
    """
    if count_and_sharding(accelerate, processes)[1]:
        yield [
            Change(options, changed_recipe, accelerate, processes)
            for options, changed_recipe in _same_training(recipe, splits=False)
        ]
    same = [
        Change(options, changed_recipe, accelerate, processes)
        for options, changed_recipe in _same_training(recipe, splits=True)
    ]
    smallest = same[-1] if same else Change("", recipe, accelerate, processes)
    yield same
    yield list(_sharded(smallest))
    if recipe.peft is None and recipe.trainable.what == "full":
        yield [_adapted(Change("", recipe, accelerate, processes)), *([_adapted(smallest)] if same else [])]


def _same_training(recipe: Recipe, *, splits: bool) -> Iterator[tuple[str, Recipe]]:
    chunk_option, batch_option = "", ""
    if not recipe.objective.chunk:
        recipe = dataclasses.replace(recipe, objective=dataclasses.replace(recipe.objective, chunk=_CHUNK))
        chunk_option = f"objective.chunk={_CHUNK} "
        yield chunk_option.strip(), recipe
    rows, batches = recipe.training.per_device_train_batch_size, recipe.training.gradient_accumulation_steps
    for smaller in (rows // divisor for divisor in range(2, rows + 1) if splits and rows % divisor == 0):
        more = batches * rows // smaller
        recipe = _training(recipe, per_device_train_batch_size=smaller, gradient_accumulation_steps=more)
        batch_option = f"training.per_device_train_batch_size={smaller} training.gradient_accumulation_steps={more} "
        yield f"{chunk_option}{batch_option}".strip(), recipe
    if not recipe.checkpoints_activations:
        yield (
            f"{chunk_option}{batch_option}training.gradient_checkpointing=true",
            _training(recipe, gradient_checkpointing=True),
        )


def _sharded(change: Change) -> Iterator[Change]:
    """Yield `change` with weights, gradients and optimizer sharded over more and more GPUs."""
    current, shards = count_and_sharding(change.accelerate, change.processes)
    file = change.accelerate if shards else shipped_recipe(_FSDP).path
    launch = "" if shards else f"--accelerate fsdp2.yaml (posswap recipes {_FSDP} --copy) "
    batches = change.recipe.training.gradient_accumulation_steps
    for count in (count for count in _GPUS if count > current):
        accumulation = max(1, batches * current // count)
        options = f"{change.said} {launch}--processes {count}".strip()
        options += "" if accumulation == batches else f" training.gradient_accumulation_steps={accumulation}"
        yield Change(options, _training(change.recipe, gradient_accumulation_steps=accumulation), file, count)


def _adapted(change: Change) -> Change:
    recipe = dataclasses.replace(change.recipe, peft={"peft_type": "LORA"})
    return dataclasses.replace(change, said=f"{change.said} peft.peft_type=LORA".strip(), recipe=recipe)


def _training(recipe: Recipe, **values: Any) -> Recipe:
    return dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, **values))
