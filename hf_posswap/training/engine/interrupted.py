"""What an interrupted training leaves, and how it resumes, as text."""

from __future__ import annotations

from pathlib import Path

from hf_posswap.training.config import Phase, Recipe, phases_of
from hf_posswap.training.engine.checkpoints import SEAL, checkpoints_in, step_of
from hf_posswap.training.engine.phase import CHECKPOINTS, DONE
from hf_posswap.utils.user_paths import expand_home


def resume_note(recipe: Recipe) -> str:
    """Return what is saved of the training by `recipe`, and how it resumes.

    Args:
        recipe: of the training, which was interrupted.
    """
    folder, phases = expand_home(recipe.out).resolve(), phases_of(recipe)
    finished = [phase.name for phase in phases if (folder / phase.name / DONE).is_file()]
    if len(finished) == len(phases):
        return f"Interrupted after the training: the model is saved in {folder}. The same command measures it."
    phase = phases[len(finished)]
    saved = [f"{', '.join(finished)}, finished"] if finished else []
    step, path = _newest(folder, phase)
    if path is not None:
        saved.append(f"step {step} of {phase.recipe.training.max_steps}{_of(phase)}, in {path}")
    if not saved:
        return f"Interrupted: nothing is saved yet, and the same command starts again. {_when_saved(phase)}."
    begins = f"at step {step + 1}" if path is not None else f"with {phase.name}"
    return f"Interrupted. Saved: {'; '.join(saved)}. The same command resumes {begins}."


def _of(phase: Phase) -> str:
    return f" of {phase.name}" if phase.name else ""


def _newest(folder: Path, phase: Phase) -> tuple[int, Path | None]:
    """Return the step and the folder of the newest complete checkpoint; 0 and None: there is none."""
    sealed = (path for path in checkpoints_in(folder / phase.name / CHECKPOINTS) if (path / SEAL).is_file())
    path = next(sealed, None)
    return (0, None) if path is None else (step_of(path), path)


def _when_saved(phase: Phase) -> str:
    training = phase.recipe.training
    every = training.save_steps
    if training.save_strategy != "steps":
        return f"Checkpoints are written by training.save_strategy={training.save_strategy}"
    share = f"{every:g} of the steps" if every < 1 else f"{every:g} steps"
    return f"A checkpoint is written every {share} (training.save_steps)"
