"""transformers' Trainer, changed only where positions, losses and checkpoints need it, and its callbacks.

They stop on an exploding loss, advance a gradual swap, and end a stage that has recovered.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from hf_posswap.checkpoints.adapters import refuse_lost_positions, write_sidecars
from hf_posswap.compat.transformers_trainer import SavingTrainer
from hf_posswap.errors import ConfigError, NumericError
from hf_posswap.patching.tools.scheme_values import set_blend
from hf_posswap.training.config import GateSettings, StageSettings
from hf_posswap.training.engine.checkpoints import UNFINISHED, newest, rotate, seal, take_place
from hf_posswap.training.engine.log import RunLog
from hf_posswap.training.engine.objectives import Objective
from hf_posswap.training.engine.parallel import shard_on_cpus

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ADVANCED = "stage_done"
Groups = Callable[[Any], list[dict[str, Any]]]
"""From the model, wrapped or not, to the parameter groups of the optimizer."""


@dataclass(eq=False)
class LossExplosionCallback(TrainerCallback):
    """Stops a training whose loss explodes. It reads the log in the trainer state, which checkpoints save.

    Attributes:
        settings: of the recipe.
        last_good: returns a sentence with the last good checkpoint.
    """

    settings: GateSettings
    last_good: Callable[[], str]

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
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


@dataclass(eq=False)
class BlendScheduleCallback(TrainerCallback):
    """Sets the weight of a blend before each step, and when a training resumes to that of its checkpoint.

    Attributes:
        model: with the blend.
        steps: until the new mechanism has the full weight.
    """

    model: nn.Module
    steps: int

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        set_blend(self.model, min(1.0, state.global_step / self.steps))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        set_blend(self.model, min(1.0, (state.global_step + 1) / self.steps))


@dataclass(eq=False)
class StopWhenRecovered(TrainerCallback):
    """Ends a stage once the loss on short text has recovered.

    Attributes:
        stage: sets the tolerance and when to check.
        measure: returns the loss on short text.
        before: that of the unswapped model.
        log: records each check.
    """

    stage: StageSettings
    measure: Callable[[], float]
    before: float
    log: RunLog

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        step = state.global_step
        if self.stage.recovered is None or step < max(1, self.stage.least_steps) or step % self.stage.check_every:
            return
        loss = self.measure()
        self.log.write({"step": step, "short_loss": loss, "short_loss_before": self.before})
        if loss <= self.before + self.stage.recovered:
            state.log_history.append({ADVANCED: True, "step": step})  # checkpoints save this log
            control.should_training_stop = True


def stage_done_at(state: TrainerState) -> int | None:
    """Return the step of `state` if a stage was done there before its last step; None: it was not."""
    ends = [int(entry["step"]) for entry in state.log_history if entry.get(ADVANCED)]
    return ends[-1] if ends and ends[-1] == state.global_step else None


@dataclass(eq=False)
class StopAtSigterm(TrainerCallback):
    """Stops a training in all its processes after the step in which one of them received SIGTERM.

    Attributes:
        accelerator: of the Trainer.
        received: the signals that this process received.
    """

    accelerator: Accelerator
    received: list[int] = field(default_factory=list)

    def is_asked(self) -> bool:
        """Return whether any process received SIGTERM; every process must call it."""
        signals = torch.tensor(len(self.received), device=self.accelerator.device)
        return bool(self.accelerator.reduce(signals))  # the sum over processes, which would otherwise stop elsewhere

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self.is_asked():
            control.should_training_stop = True


@contextmanager
def stop_at_sigterm(trainer: PosswapTrainer) -> Iterator[StopAtSigterm]:
    """Have SIGTERM stop the training of `trainer` after a whole step, within the block, and give what notes it.

    Raises:
        ConfigError: this is not the main thread, and Python gives signals to that alone.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "training.enable_jit_checkpoint: Python gives SIGTERM to the main thread alone, and this training runs in "
            "another. Call run_recipe in the main thread, or leave it out."
        )
    stop, previous = StopAtSigterm(trainer.accelerator), signal.getsignal(signal.SIGTERM)
    trainer.add_callback(stop)
    signal.signal(signal.SIGTERM, lambda number, _: stop.received.append(number))
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


class PosswapTrainer(SavingTrainer):
    """A Trainer that reads windows in order, minimizes an objective, and writes checkpoints atomically.

    Args:
        model: swapped, with its trainable parameters chosen.
        args: of transformers.
        objective: the loss.
        groups: builds the parameter groups.
        identity: of this training; checkpoints of another one are refused.
        measure: returns the loss of held-out documents at each length; None: nothing is evaluated.
        tokenizer: saved with the model; None: none is saved.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        objective: Objective,
        groups: Groups,
        identity: dict[str, object],
        measure: Callable[[], dict[int, float]] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ) -> None:
        self.groups, self.identity, self.measure, self.tokenizer = groups, identity, measure, tokenizer
        self.objective: Objective = objective
        self._writing: Path | None = None
        super().__init__(model=model, args=args, **kwargs)
        self.remove_callback(PrinterCallback)
        self.model_accepts_loss_kwargs = True  # makes the Trainer count the tokens of all micro-batches
        self.loss_is_scaled_for_ga = True

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, and keep FSDP2 on CPUs, which accelerate silently turns into DDP."""
        super().create_accelerator_and_postprocess()
        self.is_fsdp_enabled = shard_on_cpus(self.accelerator) or self.is_fsdp_enabled

    @property
    def folder(self) -> Path:
        """Folder of the checkpoints."""
        return Path(str(self.args.output_dir))

    def newest_checkpoint(self) -> Path | None:
        """Remove what a killed process left half-written, and return the checkpoint to resume from.

        Raises:
            CheckpointError: the checkpoints belong to another training.
        """
        if self.args.should_save:
            shutil.rmtree(self.folder / UNFINISHED, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        return newest(self.folder, self.identity)

    def create_optimizer(self, model: PreTrainedModel | None = None) -> torch.optim.Optimizer:
        """Create the optimizer `optim` with the recipe's parameter groups.

        Raises:
            ConfigError: it is not installed, or does not support parameter groups.
        """
        if self.optimizer is None:
            target_model = self.model if model is None else model
            try:
                optimizer_cls, options = self.get_optimizer_cls_and_kwargs(self.args, target_model)  # type: ignore[arg-type]
            except (ImportError, ValueError, RuntimeError) as error:
                raise ConfigError(f"training.optim: {' '.join(str(error).split())}") from error
            if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, torch.optim.Optimizer)):
                raise ConfigError(f"training.optim: {self.args.optim} does not support parameter groups: use another.")
            self.optimizer = optimizer_cls(self.groups(target_model), **options)
        return self.optimizer

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Do nothing: the finished model is pushed once it is verified."""

    def evaluate(
        self, eval_dataset: object = None, ignore_keys: Sequence[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the loss of held-out documents at each length, without changing the state of random generators."""
        assert self.measure is not None
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=devices):
            loss_by_length = self.measure()
        metrics = {f"{metric_key_prefix}_loss_at_{length}": nll for length, nll in loss_by_length.items()}
        metrics |= {f"{metric_key_prefix}_loss": loss_by_length[max(loss_by_length)]} if loss_by_length else {}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor | object],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, dict[str, object]]:
        """Return the objective's loss, scaled so that the mean over processes divides by the tokens of all processes.

        Raises:
            NumericError: it is NaN or infinite; the message names the last good checkpoint.
        """
        config = getattr(self.accelerator, "parallelism_config", None)
        if config is not None and getattr(config, "sp_enabled", False):  # DeepSpeed splits the sequences
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = self.objective(model, inputs, num_items_in_batch)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        if not bool(torch.isfinite(loss)):
            raise NumericError(
                f"the loss became {loss.item()} at step {self.state.global_step + 1} of {self.state.max_steps} "
                f"(learning rate {self.current_learning_rate():.2g}). {self.last_good()} Use a smaller learning rate "
                "or a longer warm-up."
            )
        return (loss, {}) if return_outputs else loss

    def last_good(self) -> str:
        """Return a sentence with the newest complete checkpoint."""
        checkpoint = newest(self.folder, self.identity)
        return "There is no checkpoint yet." if checkpoint is None else f"The last good checkpoint is {checkpoint}."

    def checkpoint_parent(self) -> str | None:
        """Return the folder of the checkpoint that is being written, or None."""
        return None if self._writing is None else str(self._writing)

    def write_checkpoint(self, write: Callable[[], None]) -> None:
        """Write a checkpoint to a temporary folder, seal it, and then move it to its final name."""
        name = f"checkpoint-{self.state.global_step}"
        self._writing = self.folder / UNFINISHED
        try:
            write()
        except BaseException:
            if self.args.should_save:
                shutil.rmtree(self.folder / UNFINISHED, ignore_errors=True)  # a full disk needs the space
            raise
        finally:
            self._writing = None
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            seal(self.folder / UNFINISHED / name, self.state.global_step, self.identity)
            take_place(self.folder / UNFINISHED / name, self.folder / name)
            rotate(self.folder, self.args.save_total_limit)
        self.accelerator.wait_for_everyone()

    def write_model_files(self, folder: str | None, weights: dict[str, Tensor] | None) -> None:
        """Write the model with its swap, and its tokenizer, without pickled arguments."""
        if not self.args.should_save:
            return
        output_folder = Path(folder or self.folder)
        os.makedirs(output_folder, exist_ok=True)
        target = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        refuse_lost_positions(target)
        target.save_pretrained(output_folder, state_dict=weights)
        write_sidecars(target, output_folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(output_folder)

    def write_model(self, folder: Path) -> None:
        """Write the current model to the new `folder`; every process must call it."""
        state = None
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            state = self.accelerator.get_state_dict(self.model_wrapped)
        self.write_model_files(str(folder), state)
        self.accelerator.wait_for_everyone()
