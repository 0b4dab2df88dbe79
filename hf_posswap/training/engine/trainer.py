"""transformers' Trainer, changed only where positions, losses and checkpoints need it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.trainer_callback import PrinterCallback

from hf_posswap.checkpoints.adapters import write_sidecars
from hf_posswap.checkpoints.adapters_positions import refuse_lost_positions
from hf_posswap.compat.transformers_trainer import SavingTrainer
from hf_posswap.errors import ConfigError, NumericError
from hf_posswap.training.engine.checkpoints import UNFINISHED, newest, rotate, seal, take_place
from hf_posswap.training.engine.objectives import Objective
from hf_posswap.training.engine.parallel import shard_on_cpus

Groups = Callable[[Any], list[dict[str, Any]]]
"""From the model, wrapped or not, to the parameter groups of the optimizer."""


class PosswapTrainer(SavingTrainer):
    """A Trainer that reads windows in order, minimises an objective, and never tears a checkpoint.

    Args:
        model: prepared: swapped, and its trainable parameters chosen.
        args: of transformers.
        objective: the loss.
        groups: makes the parameter groups.
        identity: of this training: a checkpoint of another one is refused.
        measure: returns the loss of held-out documents at each length; None: nothing is evaluated.
        tokenizer: saved beside the model; None: none is.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        objective: Objective,
        groups: Groups,
        identity: dict[str, Any],
        measure: Callable[[], dict[int, float]] | None = None,
        tokenizer: Any = None,
        **kwargs: Any,
    ) -> None:
        self.groups, self.identity, self.measure, self.tokenizer = groups, identity, measure, tokenizer
        self.objective: Objective = objective
        self._writing: Path | None = None
        super().__init__(model=model, args=args, **kwargs)
        self.remove_callback(PrinterCallback)
        self.model_accepts_loss_kwargs = True  # so that counted tokens of all micro-batches are summed
        self.loss_is_scaled_for_ga = True

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator; FSDP2 that was asked for on CPUs is FSDP2, which accelerate turns into DDP silently."""
        super().create_accelerator_and_postprocess()
        self.is_fsdp_enabled = shard_on_cpus(self.accelerator) or self.is_fsdp_enabled

    @property
    def folder(self) -> Path:
        """Where the checkpoints lie."""
        return Path(str(self.args.output_dir))

    def newest_checkpoint(self) -> Path | None:
        """Return what to go on from, after all that a killed process left half-written is gone.

        Raises:
            CheckpointError: the checkpoints belong to another training.
        """
        if self.args.should_save:
            shutil.rmtree(self.folder / UNFINISHED, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        return newest(self.folder, self.identity)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make the optimizer of `optim` with the recipe's parameter groups.

        Raises:
            ConfigError: it is not installed, or takes no parameter groups.
        """
        if self.optimizer is None:
            chosen = self.model if model is None else model
            try:
                kind, options = self.get_optimizer_cls_and_kwargs(self.args, chosen)  # type: ignore[arg-type]
            except (ImportError, ValueError, RuntimeError) as error:
                raise ConfigError(f"training.optim: {' '.join(str(error).split())}") from error
            if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
                raise ConfigError(f"training.optim: {self.args.optim} takes no parameter groups: use another.")
            self.optimizer = kind(self.groups(chosen), **options)
        return self.optimizer

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Leave the Hub alone: the finished model is pushed once it is proved."""

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Sequence[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the loss of held-out documents, at the longest length and at each, without touching what is random."""
        assert self.measure is not None
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=devices):
            found = self.measure()
        metrics = {f"{metric_key_prefix}_loss_at_{length}": nll for length, nll in found.items()}
        metrics |= {f"{metric_key_prefix}_loss": found[max(found)]} if found else {}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the objective's loss, so scaled that the mean over processes divides by the tokens of all of them.

        Raises:
            NumericError: it is no number; the message names the last good checkpoint.
        """
        if self._splits_by_deepspeed():
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = self.objective(model, inputs, num_items_in_batch)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        if not bool(torch.isfinite(loss)):
            raise NumericError(
                f"the loss became {loss.item()} at step {self.state.global_step + 1} of {self.state.max_steps} "
                f"(learning rate {self.current_learning_rate():.2g}). {self.last_good()} Take a smaller learning rate "
                "or a longer warm-up."
            )
        return (loss, {}) if return_outputs else loss

    def _splits_by_deepspeed(self) -> bool:
        config = getattr(self.accelerator, "parallelism_config", None)
        return config is not None and getattr(config, "sp_enabled", False)

    def last_good(self) -> str:
        """Return a sentence that names the newest whole checkpoint."""
        found = newest(self.folder, self.identity)
        return "There is no checkpoint yet." if found is None else f"The last good checkpoint is {found}."

    def checkpoint_parent(self) -> str | None:
        """Return the folder for what is half-written, while there is any."""
        return None if self._writing is None else str(self._writing)

    def write_checkpoint(self, write: Callable[[], None]) -> None:
        """Write a checkpoint beside the others, seal it, and only then give it its name."""
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

    def write_model_files(self, folder: str | None, weights: dict[str, Any] | None) -> None:
        """Write the model with its swap, and its tokenizer; no pickled arguments."""
        if not self.args.should_save:
            return
        place = Path(folder or self.folder)
        os.makedirs(place, exist_ok=True)
        target: Any = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        refuse_lost_positions(target)
        target.save_pretrained(place, state_dict=weights)
        write_sidecars(target, place)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(place)

    def write_model(self, folder: Path) -> None:
        """Write the model as it stands to `folder`, which is new; every process has to call it."""
        state = None
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            state = self.accelerator.get_state_dict(self.model_wrapped)
        self.write_model_files(str(folder), state)
        self.accelerator.wait_for_everyone()
