"""The private methods of transformers' Trainer that ours overrides or calls, under public names.

All are alike in transformers 5.14 to 5.23, but for what says otherwise. Only `training` reads this module: it imports
transformers, and is not part of the code that goes along with checkpoints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

if TYPE_CHECKING:
    from torch.nn.modules.module import _IncompatibleKeys


class SavingTrainer(Trainer):
    """A Trainer whose writing of checkpoints can be changed in methods that are no private ones of transformers."""

    def checkpoint_parent(self) -> str | None:
        """Return the folder in which the next checkpoint is made; None: that of the arguments.

        Touches `Trainer._get_output_dir`. Without it a checkpoint is written where a killed process leaves half of it.
        """
        return None

    def write_checkpoint(self, write: Callable[[], None]) -> None:
        """Write a checkpoint, which `write` does.

        Touches `Trainer._save_checkpoint`. Without it checkpoints are not sealed.
        """
        write()

    def save_checkpoint(self) -> None:
        """Write a checkpoint of the current step.

        Touches `Trainer._save_checkpoint`. Without it a training that SIGTERM stops loses the steps since its last one.
        """
        self._save_checkpoint(self.model_wrapped, None)

    def write_model_files(self, folder: str | None, weights: dict[str, Tensor] | None) -> None:
        """Write the files of the model to `folder`; `weights` where they had to be gathered.

        Touches `Trainer._save`. Without it checkpoints hold pickled arguments, and no sidecars.
        """
        super()._save(folder, weights)

    def current_learning_rate(self) -> float:
        """Return the learning rate of the step.

        Touches `Trainer._get_learning_rate`. Without it an error cannot name the rate at which it came.
        """
        return float(self._get_learning_rate())

    def _get_output_dir(self, trial: object) -> str:
        return self.checkpoint_parent() or super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        inherited = super()._save_checkpoint
        self.write_checkpoint(lambda: inherited(model, trial))

    def _build_accelerator_args(self, **kwargs: object) -> dict[str, object]:
        """Leave torch.compile to the engine, which compiles each layer by itself; accelerate would all as one.

        Touches `Trainer._build_accelerator_args`. Without it the loss cannot run body and head of the model apart.
        """
        from accelerate.utils import TorchDynamoPlugin

        left = TorchDynamoPlugin(backend="no")  # for None it asks the launcher's environment
        return {**super()._build_accelerator_args(**kwargs), "dynamo_plugin": left}

    def _issue_warnings_after_load(self, load_result: _IncompatibleKeys) -> None:
        """Warn of weights that a checkpoint lacks, but not of those tied to one that it has: it stores one of them.

        Touches `Trainer._issue_warnings_after_load`. Without it a resumed training warns of missing weights that are
        there.
        """
        assert self.model is not None
        state, missing = self.model.state_dict(keep_vars=True), set(load_result.missing_keys)
        loaded = {id(weight) for name, weight in state.items() if name not in missing}
        absent = [name for name in load_result.missing_keys if id(state.get(name)) not in loaded]
        super()._issue_warnings_after_load(type(load_result)(absent, load_result.unexpected_keys))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        self.write_model_files(output_dir, state_dict)


def use_one_gpu(arguments: TrainingArguments) -> None:
    """Have a Trainer with `arguments` use one GPU where a process sees several: it would share batches by DataParallel.

    Touches `TrainingArguments._n_gpu`. Without it the losses of a batch are means of means.
    """
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1


def checkpointing_argument() -> str:
    """Return what TrainingArguments calls the making again of activations.

    Touches the field `gradient_checkpointing`, which transformers renamed to `activation_checkpointing` after 5.14.
    Without it one of the two releases warns, or does not know the argument.
    """
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    return "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
