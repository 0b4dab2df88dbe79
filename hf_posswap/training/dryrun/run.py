"""A recipe run dry: what it would hold and do, found without weights, text or a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posswap.errors import ConfigError, UnsupportedModelError, UnsupportedSwapError
from hf_posswap.training.config import Recipe, phases_of
from hf_posswap.training.dryrun.cards import Card
from hf_posswap.training.dryrun.changes import Change, ladders
from hf_posswap.training.dryrun.launching import launched
from hf_posswap.training.dryrun.prediction import Prediction
from hf_posswap.training.dryrun.rehearsal import rehearse
from hf_posswap.training.engine.launch_file import as_launched
from hf_posswap.training.engine.parallel import is_launched_on_cpu, launch_of
from hf_posswap.utils.progress import quiet_transformers

Say = Callable[[str], None]


@dataclass(frozen=True)
class DryRun:
    """What a recipe would hold and do.

    Attributes:
        predictions: of each phase.
        said: what else is to be known, in sentences.
        change: the smallest that makes it fit; None: it fits, or no card was given, or none was found.
        changed: the predictions after it.
    """

    predictions: tuple[Prediction, ...]
    said: tuple[str, ...] = ()
    change: Change | None = None
    changed: tuple[Prediction, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether every phase fits; None: no card was given."""
        return _fit(self.predictions)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON."""
        return {
            "fits": self.fits,
            "phases": [one.to_dict() for one in self.predictions],
            "said": list(self.said),
            "change": None if self.change is None else self.change.said,
            "changed": [one.to_dict() for one in self.changed],
        }


def dry_run(
    recipe: Recipe,
    *,
    card: Card | None = None,
    accelerate: Path | None = None,
    processes: int | None = None,
    say: Say | None = None,
) -> DryRun:
    """Return what a training by `recipe` would hold and do on each GPU, by a few steps of the engine without numbers.

    Of the model only config.json is read; tokens are made up, and windows are cut from them as the recipe says. All
    else is as in the training: plan and swap, what is trained, the Trainer, accelerate, sharding, the optimizer.

    Args:
        recipe: from `load_recipe`.
        card: the GPU; None: the memory of one is told, and not whether it is enough.
        accelerate: the file that accelerate launch would be given; None: none.
        processes: GPUs; None: as the file says, 1 without one.
        say: shows a line while changes are tried; None: nothing is shown.

    Raises:
        ConfigError: the launch or the recipe asks for what cannot be run dry, by name; or for a CPU, and for a card.
        UnsupportedModelError: the model's step goes by numbers of its weights.
        PosswapError: what refuses the recipe itself.
    """
    _refuse(recipe)
    predictions, said = _predict(recipe, card, accelerate, processes)
    if card is None or _fit(predictions):
        return DryRun(predictions, said)
    for ladder in ladders(recipe, accelerate, processes):
        found = _first_that_fits(ladder, card, say or (lambda line: None))
        if found is not None:
            return DryRun(predictions, said, *found)
    return DryRun(predictions, said)


def _first_that_fits(ladder: list[Change], card: Card, say: Say) -> tuple[Change, tuple[Prediction, ...]] | None:
    """Return the first step of `ladder` that fits, and its predictions; None: not even the last one does."""
    tried: dict[str, tuple[Prediction, ...]] = {}
    for change in [*ladder[-1:], *ladder]:  # where the last does not fit, no other does
        if change.said not in tried:
            say(f"it does not fit; trying {change.said}")
            try:
                tried[change.said], _ = _predict(change.recipe, card, change.accelerate, change.processes)
            except (UnsupportedSwapError, UnsupportedModelError):  # not under this sharding, or no loss in chunks
                return None
        fits = _fit(tried[change.said])
        if not fits and len(tried) == 1:
            return None
        if fits and (len(tried) > 1 or len(ladder) == 1):
            return change, tried[change.said]
    return None


def _fit(predictions: tuple[Prediction, ...]) -> bool | None:
    return None if predictions[0].card is None else all(one.fits for one in predictions)


def _refuse(recipe: Recipe) -> None:
    if recipe.training.deepspeed:
        raise ConfigError(
            "training.deepspeed: DeepSpeed's engine keeps weights and optimizer in memory of its own, and cannot be "
            "dry-run. What can: one process, DDP and FSDP2 (--accelerate fsdp2.yaml)."
        )


def _predict(
    recipe: Recipe, card: Card | None, accelerate: Path | None, processes: int | None
) -> tuple[tuple[Prediction, ...], tuple[str, ...]]:
    found = []
    with quiet_transformers(), launched(accelerate, processes):
        recipe, said = as_launched(recipe)
        launch = launch_of(recipe)
        on_cpu = recipe.training.use_cpu or is_launched_on_cpu()
        if on_cpu and card is not None:
            raise ConfigError("--gpu is given, and training.use_cpu, or use_cpu of accelerate's file, asks for a CPU.")
        for phase in phases_of(recipe):
            seen = rehearse(phase.recipe, launch, on_gpu=not on_cpu)
            held, peak = seen.memory.at_peak, seen.memory.peak
            found.append(Prediction(phase.name, held, peak, seen.tokens, seen.work, launch.processes, card))
    if recipe.training.torch_compile:
        said = [*said, "torch.compile is left out: what is counted is each operator by itself."]
    if recipe.training.tf32:
        said = [*said, "training.tf32 is left out of the least time: it takes float32 at its full precision."]
    return tuple(found), tuple(said)
