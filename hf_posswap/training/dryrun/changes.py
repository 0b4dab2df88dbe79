"""What makes a training smaller, from what changes least."""

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
        said: what is to be given otherwise on the command line.
        recipe: with the change.
        accelerate: the file of its launch.
        processes: GPUs.
    """

    said: str
    recipe: Recipe
    accelerate: Path | None
    processes: int | None


def ladders(recipe: Recipe, accelerate: Path | None, processes: int | None) -> Iterator[list[Change]]:
    """Give ladders of what may make `recipe` fit, on each of which every step needs less memory than the one before.

    The first changes no number of the training: fewer logits at once, smaller batches and more of them, activations
    made again. The second shares weights among GPUs, the third trains adapters in place of all weights. Where weights
    are shared already, one of whole batches comes before: FSDP2 keeps whole gradients where a step has several.

    Args:
        recipe: that does not fit.
        accelerate: the file of its launch.
        processes: GPUs.
    """
    if count_and_sharding(accelerate, processes)[1]:
        yield [Change(said, changed, accelerate, processes) for said, changed in _same_training(recipe, splits=False)]
    same = [Change(said, changed, accelerate, processes) for said, changed in _same_training(recipe, splits=True)]
    least = same[-1] if same else Change("", recipe, accelerate, processes)
    yield same
    yield list(_shared(least))
    if recipe.peft is None and recipe.trainable.what == "full":
        yield [_adapted(Change("", recipe, accelerate, processes)), *([_adapted(least)] if same else [])]


def _same_training(recipe: Recipe, *, splits: bool) -> Iterator[tuple[str, Recipe]]:
    chunk, split = "", ""
    if not recipe.objective.chunk:
        recipe = dataclasses.replace(recipe, objective=dataclasses.replace(recipe.objective, chunk=_CHUNK))
        chunk = f"objective.chunk={_CHUNK} "
        yield chunk.strip(), recipe
    rows, batches = recipe.training.per_device_train_batch_size, recipe.training.gradient_accumulation_steps
    for smaller in (rows // divisor for divisor in range(2, rows + 1) if splits and rows % divisor == 0):
        more = batches * rows // smaller
        recipe = _training(recipe, per_device_train_batch_size=smaller, gradient_accumulation_steps=more)
        split = f"training.per_device_train_batch_size={smaller} training.gradient_accumulation_steps={more} "
        yield f"{chunk}{split}".strip(), recipe
    if not recipe.checkpoints_activations:
        yield f"{chunk}{split}training.gradient_checkpointing=true", _training(recipe, gradient_checkpointing=True)


def _shared(change: Change) -> Iterator[Change]:
    """Give the training of `change` with weights, gradients and optimizer shared among more and more GPUs."""
    now, shards = count_and_sharding(change.accelerate, change.processes)
    file = change.accelerate if shards else shipped_recipe(_FSDP).path
    launch = "" if shards else f"--accelerate fsdp2.yaml (posswap recipes {_FSDP} --copy) "
    batches = change.recipe.training.gradient_accumulation_steps
    for count in (count for count in _GPUS if count > now):
        fewer = max(1, batches * now // count)
        said = f"{change.said} {launch}--processes {count}".strip()
        said += "" if fewer == batches else f" training.gradient_accumulation_steps={fewer}"
        yield Change(said, _training(change.recipe, gradient_accumulation_steps=fewer), file, count)


def _adapted(change: Change) -> Change:
    recipe = dataclasses.replace(change.recipe, peft={"peft_type": "LORA"})
    return dataclasses.replace(change, said=f"{change.said} peft.peft_type=LORA".strip(), recipe=recipe)


def _training(recipe: Recipe, **values: Any) -> Recipe:
    return dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, **values))
