"""Runs a training: all phases, the finished model and its report. After an interruption the same call resumes."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posswap.errors import ConfigError
from hf_posswap.training.config import Recipe, phases_of
from hf_posswap.training.config.load import to_dict
from hf_posswap.training.data.sources import require_sources
from hf_posswap.training.engine.arguments import training_arguments
from hf_posswap.training.engine.checkpoints import SEAL, checkpoints_in, identity_of, step_of, writing_to
from hf_posswap.training.engine.finish import finish
from hf_posswap.training.engine.parallel import (
    as_launched,
    environment_kept,
    launch_of,
    refuse_deepspeed,
    refuse_on_cpu,
    refuse_silent_errors,
)
from hf_posswap.training.engine.phase import CHECKPOINTS, DONE, MODEL, Run, run_phase
from hf_posswap.training.engine.preparing import chosen_scheme
from hf_posswap.training.engine.services import Services
from hf_posswap.utils.atomic_io import alone_in, writable_folder, write_json
from hf_posswap.utils.printable import in_lines
from hf_posswap.utils.progress import quiet_transformers
from hf_posswap.utils.result_views import ResultView
from hf_posswap.utils.threads import keep_log_level
from hf_posswap.utils.user_paths import real_path


def resume_note(recipe: Recipe) -> str:
    """Return what is saved of the training by `recipe`, and how it resumes.

    Args:
        recipe: of the training, which was interrupted.
    """
    folder, phases = real_path(recipe.out), phases_of(recipe)
    finished = [phase.name for phase in phases if (folder / phase.name / DONE).is_file()]
    if len(finished) == len(phases):
        return f"Interrupted after the training: the model is saved in {folder}. The same command measures it."
    phase = phases[len(finished)]
    saved = [f"{', '.join(finished)}, finished"] if finished else []
    sealed = (path for path in checkpoints_in(folder / phase.name / CHECKPOINTS) if (path / SEAL).is_file())
    newest = next(sealed, None)
    if newest is not None:
        of_phase = f" of {phase.name}" if phase.name else ""
        saved.append(f"step {step_of(newest)} of {phase.recipe.training.max_steps}{of_phase}, in {newest}")
    if not saved:
        training = phase.recipe.training
        every = training.save_steps
        when_saved = f"Checkpoints are written by training.save_strategy={training.save_strategy}"
        if training.save_strategy == "steps":
            share = f"{every:g} of the steps" if every < 1 else f"{every:g} steps"
            when_saved = f"A checkpoint is written every {share} (training.save_steps)"
        return f"Interrupted: nothing is saved yet, and the same command starts again. {when_saved}."
    begins = f"at step {step_of(newest) + 1}" if newest is not None else f"with {phase.name}"
    if newest is not None and step_of(newest) == phase.recipe.training.max_steps:
        begins = "after it, and writes the model"
    return f"Interrupted. Saved: {'; '.join(saved)}. The same command resumes {begins}."


@dataclass(frozen=True, repr=False)
class Finished(ResultView):
    """The outputs of a training.

    Attributes:
        folder: of the run.
        model: folder of the finished model, for `hf_posswap.load`.
        report: as in report.json; empty except on the main process.
    """

    folder: Path
    model: Path
    report: dict[str, Any]

    def __str__(self) -> str:
        return in_lines(f"{name:<13} {value}" for name, value in self._html_rows())

    def _repr_facts(self) -> dict[str, object]:
        facts = {name: self.report[name] for name in ("scheme", "nll") if self.report.get(name)}
        return {"folder": str(self.folder), "model": str(self.model)} | facts

    def _html_rows(self) -> list[tuple[str, str]]:
        losses = self.report.get("nll") or {}
        return [
            ("run", str(self.folder)),
            ("model", str(self.model)),
            *((f"held-out loss at {length} tokens", f"{loss:.4f}") for length, loss in losses.items()),
            *([("report", str(self.folder / "report.md"))] if self.report else []),
        ]


def run_recipe(recipe: Recipe, services: Services | None = None) -> Finished:
    """Train by `recipe`, and return the outputs.

    After an interruption, even by SIGKILL, the same call resumes from the newest complete checkpoint and ends with the
    same weights, if documents and base are unchanged. Once finished, it returns the existing outputs,
    measured anew if `evaluation` has changed.

    Args:
        recipe: from `load_recipe`.
        services: for evaluation and output; None: nothing is shown or evaluated, and free memory is not checked.

    Raises:
        ConfigError: the recipe names no text, needs a service that is not given, or does not fit the model.
        CheckpointError: the folder belongs to another training, another process writes there, or it cannot be
            written.
        TrainingError, NumericError, NotEnoughMemoryError, PositionRangeError: a check failed.
        UnsupportedSwapError: the swap is not possible, or not under this kind of parallelism.
    """
    with environment_kept():
        return _run_recipe(recipe, services or Services())


def _run_recipe(recipe: Recipe, services: Services) -> Finished:
    evaluation_keys = {"training.eval_strategy": recipe.training.eval_strategy != "no" or recipe.training.eval_on_start,
                 "evaluation.lengths": bool(recipe.evaluation.lengths)}  # fmt: skip
    for key in (key for key, is_set in evaluation_keys.items() if is_set and services.evaluate is None):
        raise ConfigError(f"{key} needs Services.evaluate, which posswap train and recipes/train.py provide.")
    require_sources(recipe.data)
    recipe, differences = as_launched(recipe)
    refuse_deepspeed(recipe)
    launch = launch_of(recipe)
    phases = phases_of(recipe)
    folder = real_path(recipe.out)
    for phase in phases:  # before anything loads; the resolved scheme is checked again once the model is loaded
        refuse_silent_errors(phase.recipe, chosen_scheme(phase.recipe), launch)
        refuse_on_cpu(phase.recipe, launch)
        training_arguments(phase.recipe, folder / phase.name)
    main = int(os.environ.get("RANK", "0")) == 0
    run = Run(folder, identity_of(recipe, launch), launch, services, main)
    with ExitStack() as stack:
        stack.enter_context(keep_log_level("transformers"))  # a Trainer sets it
        stack.enter_context(quiet_transformers())
        stack.enter_context(writing_to(folder))
        if main:
            stack.enter_context(alone_in(writable_folder(folder), "training"))
            write_json(folder / "recipe.json", to_dict(recipe))
        for line in differences:
            run.say(line)
        results, weights = [], None
        for phase in phases:
            results.append(run_phase(phase, run, weights))
            weights = folder / phase.name / MODEL
        assert weights is not None
        report = finish(recipe, run, results, weights) if main else {}
    return Finished(folder, weights, report)
