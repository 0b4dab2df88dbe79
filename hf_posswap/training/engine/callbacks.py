"""Callbacks: stop on an exploding loss, advance a gradual swap, and end a stage that has recovered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_posswap.errors import NumericError
from hf_posswap.patching.tools.blending import set_blend
from hf_posswap.training.config import GateSettings, StageSettings
from hf_posswap.training.engine.log import RunLog

ADVANCED = "stage_done"


class LossExplosionCallback(TrainerCallback):
    """Stops a training whose loss explodes. It reads the log in the trainer state, which checkpoints save.

    Args:
        settings: of the recipe.
        last_good: returns a sentence with the last good checkpoint.
    """

    def __init__(self, settings: GateSettings, last_good: Callable[[], str]) -> None:
        self.settings, self.last_good = settings, last_good

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        problem = explosion(losses, self.settings)
        if problem and "loss" in state.log_history[-1]:
            raise NumericError(
                f"the loss exploded by step {state.global_step}: {problem}. {self.last_good()} Use a smaller learning "
                "rate or a longer warm-up; gates.explosion sets how far it may rise."
            )


def explosion(losses: list[float], settings: GateSettings) -> str | None:
    """Return what is wrong with the last of `losses`, or None.

    Example:
        >>> explosion([3.0, 2.0, 2.0, 9.0], GateSettings(explosion=3.0, window=2))
        '9.00, 7.00 nats above the best mean of 2 (2.00)'
        >>> explosion([3.0, 2.0, 2.0, 4.0], GateSettings(explosion=3.0, window=2))
    """
    window, earlier = settings.window, losses[:-1]
    if not settings.explosion or len(earlier) < window:
        return None
    sums = np.convolve(earlier, np.ones(window), mode="valid")
    best = float(sums.min()) / window
    above = losses[-1] - best
    if above <= settings.explosion:
        return None
    return f"{losses[-1]:.2f}, {above:.2f} nats above the best mean of {window} ({best:.2f})"


class BlendScheduleCallback(TrainerCallback):
    """Advances a blend at the beginning of each step.

    Args:
        model: with the blend.
        steps: until the new mechanism has the full weight.
    """

    def __init__(self, model: Any, steps: int) -> None:
        self.model, self.steps = model, steps

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        set_blend(self.model, blend_share(state.global_step, self.steps))


def blend_share(step: int, steps: int) -> float:
    """Return the share of the new mechanism at `step`, counted from 0, of a swap spread over `steps`.

    Example:
        >>> [blend_share(step, 4) for step in (0, 1, 3, 9)]
        [0.25, 0.5, 1.0, 1.0]
    """
    return min(1.0, (step + 1) / steps)


class StopWhenRecovered(TrainerCallback):
    """Ends a stage once the loss on short text has recovered.

    Args:
        stage: sets the tolerance and when to check.
        measure: returns the loss on short text.
        before: that of the unswapped model.
        log: records each check.
    """

    def __init__(self, stage: StageSettings, measure: Callable[[], float], before: float, log: RunLog) -> None:
        self.stage, self.measure, self.before, self.log = stage, measure, before, log

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        step = state.global_step
        if self.stage.recovered is None or step < max(1, self.stage.least_steps) or step % self.stage.check_every:
            return
        loss = self.measure()
        self.log.write({"step": step, "short_loss": loss, "short_loss_before": self.before})
        if loss <= self.before + self.stage.recovered:
            state.log_history.append({ADVANCED: True, "step": step})  # checkpoints save this log
            control.should_training_stop = True


def stage_done_at(checkpoint: Path | None) -> int | None:
    """Return the step at which a stage was done, if `checkpoint` was written then; None: the stage resumes."""
    if checkpoint is None:
        return None
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    ends = [entry["step"] for entry in state.log_history if entry.get(ADVANCED)]
    return ends[-1] if ends and ends[-1] == state.global_step else None
