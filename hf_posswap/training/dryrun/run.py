"""Dry-runs a recipe: predicts memory and work without weights, text or a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posswap.errors import ConfigError, UnsupportedModelError, UnsupportedSwapError
from hf_posswap.training.config import Phase, Recipe, phases_of
from hf_posswap.training.config.load import check_recipe
from hf_posswap.training.dryrun.cards import Card, card_of
from hf_posswap.training.dryrun.changes import Change, ladders
from hf_posswap.training.dryrun.launching import launch_file, launched
from hf_posswap.training.dryrun.prediction import Prediction
from hf_posswap.training.dryrun.rehearsal import rehearse
from hf_posswap.training.engine.launch_file import as_launched
from hf_posswap.training.engine.parallel import Launch, is_launched_on_cpu, launch_of
from hf_posswap.utils.format import human_bytes
from hf_posswap.utils.progress import quiet_transformers
from hf_posswap.utils.result_views import ResultView
from hf_posswap.utils.threads import PROCESS

Say = Callable[[str], None]


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

    def _repr_facts(self) -> dict[str, Any]:
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

    def to_dict(self) -> dict[str, Any]:
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
        ConfigError: `recipe` is no recipe, a dry run does not support the launch or the recipe, or a GPU is given for a
            training on a CPU.
        UnsupportedModelError: the model's step depends on values of its weights.
        PosswapError: the recipe itself is refused.
    """
    check_recipe(recipe, "dry_run")
    card = card_of(gpu) if isinstance(gpu, str) else gpu
    accelerate = launch_file(accelerate) if isinstance(accelerate, str) else accelerate
    _refuse(recipe)
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


def _progress(phase: Phase, launch: Launch) -> str:
    steps, gpus = 1 + len(phase.recipe.data.cut), launch.processes
    name, share = phase.name or phase.recipe.name or "the recipe", "one GPU" if gpus == 1 else f"one of {gpus} GPUs"
    return f"{name}: running {steps} steps of {share} on tensors without values, in seconds to minutes"


def _fit(predictions: tuple[Prediction, ...]) -> bool | None:
    return None if predictions[0].card is None else all(prediction.fits for prediction in predictions)


def _refuse(recipe: Recipe) -> None:
    if recipe.training.deepspeed:
        raise ConfigError(
            "training.deepspeed: DeepSpeed's engine manages the memory of weights and optimizer, and cannot be "
            "dry-run. A dry run supports one process, DDP and FSDP2 (--accelerate fsdp2.yaml)."
        )


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
                say(_progress(phase, launch))
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
