"""Dry-runs a recipe: predicts memory and work without weights, text or a GPU.

What does not fit is run again with changes that reduce memory, the least intrusive first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posswap.errors import ConfigError, UnsupportedModelError, UnsupportedSwapError
from hf_posswap.training.config import Recipe, phases_of
from hf_posswap.training.config.load import check_recipe
from hf_posswap.training.config.shipped import shipped_recipe
from hf_posswap.training.dryrun.launching import count_and_sharding, launch_file, launched
from hf_posswap.training.dryrun.prediction import Card, Prediction, card_of
from hf_posswap.training.dryrun.rehearsal import rehearse
from hf_posswap.training.engine.parallel import as_launched, is_launched_on_cpu, launch_of
from hf_posswap.utils.format import human_bytes
from hf_posswap.utils.progress import quiet_transformers
from hf_posswap.utils.result_views import ResultView
from hf_posswap.utils.threads import PROCESS

_FSDP = "accelerate/fsdp2"
_GPUS = (2, 4, 8, 16, 32, 64)
_CHUNK = 1024
Say = Callable[[str], None]


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


@dataclass(frozen=True, repr=False)
class DryRun(ResultView):
    """The predicted memory and work of a recipe.

    Attributes:
        predictions: of each phase.
        said: notes, in sentences.
        change: the smallest change that makes it fit; None: it fits, no card was given, or no change was found.
        changed: the predictions after the change.
    """

    predictions: tuple[Prediction, ...]
    said: tuple[str, ...] = ()
    change: Change | None = None
    changed: tuple[Prediction, ...] = ()

    def _repr_facts(self) -> dict[str, object]:
        change = None if self.change is None else self.change.said
        peaks = [human_bytes(prediction.peak) for prediction in self.predictions]
        return {"fits": self.fits, "phases": len(self.predictions), "peaks": peaks, "change": change}

    def _html_rows(self) -> list[tuple[str, str]]:
        rows = [row for prediction in self.predictions for row in prediction.rows()]
        change = [] if self.change is None else [("change", self.change.said)]
        return [*rows, *change, *(("note", note) for note in self.said)]

    @property
    def fits(self) -> bool | None:
        """Whether every phase fits; None: no card was given."""
        return _fit(self.predictions)

    def to_dict(self) -> dict[str, object]:
        """Return the results as JSON."""
        return {
            "fits": self.fits,
            "phases": [prediction.to_dict() for prediction in self.predictions],
            "said": list(self.said),
            "change": None if self.change is None else self.change.said,
            "changed": [prediction.to_dict() for prediction in self.changed],
        }


def dry_run(
    recipe: Recipe,
    *,
    gpu: Card | str | None = None,
    accelerate: Path | str | None = None,
    processes: int | None = None,
    say: Say | None = None,
) -> DryRun:
    """Return the memory and work of a training by `recipe` on each GPU, from a few steps on fake tensors.

    Only config.json of the model is read; tokens are synthetic, and cut into windows as the recipe says. Everything
    else runs as in the training: plan and swap, trainable parameters, the Trainer, accelerate, sharding, the optimizer.

    Args:
        recipe: from `load_recipe`.
        gpu: the GPU: a name or a memory size as in `card_of`, or a `Card`; None: memory is predicted, but not whether
            it fits.
        accelerate: the file for accelerate launch, or the name of one of the package, such as "fsdp2"; None: none.
        processes: number of GPUs; None: the file's, or 1 without a file.
        say: shows a line before each phase and each change that is tried; None: nothing is shown.

    Raises:
        UnknownNameError, OptionError: no such GPU or file.
        ConfigError: `recipe` is not a recipe, a dry run does not support the launch or the recipe, or a GPU is given
            for a training on a CPU.
        UnsupportedModelError: the model's step depends on values of its weights.
        PosswapError: the recipe itself is refused.
    """
    check_recipe(recipe, "dry_run")
    card = card_of(gpu) if isinstance(gpu, str) else gpu
    accelerate = launch_file(accelerate) if isinstance(accelerate, str) else accelerate
    if recipe.training.deepspeed:
        raise ConfigError(
            "training.deepspeed: DeepSpeed's engine manages the memory of weights and optimizer, and cannot be "
            "dry-run. A dry run supports one process, DDP and FSDP2 (--accelerate fsdp2.yaml)."
        )
    predictions, notes = _predict(recipe, card, accelerate, processes, say)
    if card is None or _fit(predictions):
        return DryRun(predictions, notes)
    for ladder in ladders(recipe, accelerate, processes):
        change_that_fits = _first_that_fits(ladder, card, say or (lambda line: None))
        if change_that_fits is not None:
            return DryRun(predictions, notes, *change_that_fits)
    return DryRun(predictions, notes)


def _first_that_fits(ladder: list[Change], card: Card, say: Say) -> tuple[Change, tuple[Prediction, ...]] | None:
    """Return the first change of `ladder` that fits, and its predictions; None: not even the last one fits."""
    predictions_by_change: dict[str, tuple[Prediction, ...]] = {}
    for change in [*ladder[-1:], *ladder]:  # if the last does not fit, no other does
        if change.said not in predictions_by_change:
            say(f"it does not fit; trying {change.said}")
            try:
                predictions_by_change[change.said], _ = _predict(
                    change.recipe, card, change.accelerate, change.processes
                )
            except (
                UnsupportedSwapError,
                UnsupportedModelError,
            ):  # refused under this sharding, or without a chunked loss
                return None
        fits = _fit(predictions_by_change[change.said])
        if not fits and len(predictions_by_change) == 1:
            return None
        if fits and (len(predictions_by_change) > 1 or len(ladder) == 1):
            return change, predictions_by_change[change.said]
    return None


def _fit(predictions: tuple[Prediction, ...]) -> bool | None:
    return None if predictions[0].card is None else all(prediction.fits for prediction in predictions)


def _predict(
    recipe: Recipe, card: Card | None, accelerate: Path | None, processes: int | None, say: Say | None = None
) -> tuple[tuple[Prediction, ...], tuple[str, ...]]:
    predictions = []
    with PROCESS, quiet_transformers(), launched(accelerate, processes):  # a launch is one of the whole process
        recipe, notes = as_launched(recipe)
        launch = launch_of(recipe)
        on_cpu = recipe.training.use_cpu or is_launched_on_cpu()
        if on_cpu and card is not None:
            raise ConfigError("--gpu is given, and training.use_cpu, or use_cpu of accelerate's file, asks for a CPU.")
        for phase in phases_of(recipe):
            if say is not None:
                steps, gpus = 1 + len(phase.recipe.data.cut), launch.processes
                name = phase.name or phase.recipe.name or "the recipe"
                share = "one GPU" if gpus == 1 else f"one of {gpus} GPUs"
                say(f"{name}: running {steps} steps of {share} on tensors without values, in seconds to minutes")
            rehearsal = rehearse(phase.recipe, launch, on_gpu=not on_cpu)
            memory_by_kind, peak = rehearsal.memory.at_peak, rehearsal.memory.peak
            predictions.append(
                Prediction(
                    phase.name,
                    memory_by_kind,
                    peak,
                    rehearsal.tokens,
                    rehearsal.work,
                    launch.processes,
                    card,
                    phase.recipe.training.max_steps,
                )
            )
    if recipe.training.torch_compile:
        notes = [*notes, "torch.compile is not modelled: each operator is counted by itself."]
    if recipe.training.tf32:
        notes = [*notes, "training.tf32 is not modelled: the least time assumes full float32 precision."]
    return tuple(predictions), tuple(notes)
