"""A few steps of a recipe through the engine's own Trainer, without numbers, and what they held and did."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed

from hf_posswap.compat.torch_dispatch import resized_storages, storage_key
from hf_posswap.compat.torch_fake import cannot_be_fake
from hf_posswap.compat.torch_fsdp import gathered_weights, whole_gradients
from hf_posswap.errors import UnsupportedModelError
from hf_posswap.training.config import Recipe
from hf_posswap.training.dryrun.gpu_kernels import as_on_gpu
from hf_posswap.training.dryrun.meter import Memory, Meter
from hf_posswap.training.dryrun.modelling import FakeModel, fake_model, objective_of
from hf_posswap.training.dryrun.unreal import Unreal
from hf_posswap.training.dryrun.windows import made_windows
from hf_posswap.training.dryrun.work import ALL_REDUCE, Work, ring_bytes
from hf_posswap.training.engine.arguments import training_arguments
from hf_posswap.training.engine.parallel import Launch
from hf_posswap.training.engine.trainer import PosswapTrainer
from hf_posswap.training.trainable import parameter_groups
from hf_posswap.utils.atomic_io import scratch_folder
from hf_posswap.utils.threads import PROCESS

_BATCHES = 2
"""Most batches of a step that are run: those between the first and the last are as the first."""


@dataclass(frozen=True)
class Rehearsed:
    """What one process held and did.

    Attributes:
        memory: at most, by kinds.
        work: of an optimizer step, one for each kind of window that is read by turns.
        tokens: of one optimizer step.
    """

    memory: Memory
    work: tuple[Work, ...]
    tokens: int


def rehearse(recipe: Recipe, launch: Launch, *, on_gpu: bool) -> Rehearsed:
    """Return what steps of `recipe` hold and do, after the first, in which the optimizer makes its numbers.

    Args:
        recipe: without stages, as launched.
        launch: how processes share the training.
        on_gpu: whether a GPU runs them.

    Raises:
        PosswapError: what refuses the recipe itself.
        UnsupportedModelError: the step goes by numbers that only weights could give.
    """
    batches = recipe.training.gradient_accumulation_steps
    rehearsed = _short(recipe, on_gpu)
    try:
        with _seeded(recipe.training.seed):
            marks = _run(rehearsed, fake_model(recipe, launch), launch, on_gpu)
    except cannot_be_fake() as error:
        raise UnsupportedModelError(
            f"{recipe.model.name} cannot be dry-run: its step goes by numbers that weights alone give ({error})."
        ) from error
    rows = recipe.training.per_device_train_batch_size * batches
    return Rehearsed(marks.meter.settle(), marks.work_of_steps(batches), rows * recipe.data.length)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw by `seed` in the block; afterwards chance is as before, and torch's threads, which accelerate sets, too."""
    with PROCESS, torch.random.fork_rng(devices=[]):
        drawn, drawn_by_numpy, threads = random.getstate(), np.random.get_state(), torch.get_num_threads()
        try:
            set_seed(seed)
            yield
        finally:
            random.setstate(drawn)
            np.random.set_state(drawn_by_numpy)
            torch.set_num_threads(threads)


def _short(recipe: Recipe, on_gpu: bool) -> Recipe:
    """Return `recipe` with as many steps as show each kind of window once, and nothing written, told or measured."""
    training = recipe.training
    values: dict[str, Any] = {
        "max_steps": 1 + len(recipe.data.cut),
        "gradient_accumulation_steps": min(training.gradient_accumulation_steps, _BATCHES),
        "optim": training.optim or ("adamw_torch_fused" if on_gpu else None),
        "use_cpu": True,
        "bf16": training.bf16 or training.fp16,  # as large; on a CPU float16 would be float32 without a word
        "fp16": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "torch_compile": False,
        "dataloader_num_workers": 0,
        "dataloader_prefetch_factor": None,
        "dataloader_persistent_workers": False,
    }
    return dataclasses.replace(recipe, training=dataclasses.replace(training, **values))


def _run(recipe: Recipe, fake: FakeModel, launch: Launch, on_gpu: bool) -> Marks:
    geometry, training = fake.sites.geometry, recipe.training
    data = made_windows(
        recipe.data,
        fake.model.config.get_text_config(),
        causal=geometry.causal,
        scheme_length=fake.plan.max_length if fake.plan else geometry.original_length,
        first_position=fake.sites.first_position,
        dtype=fake.model.dtype,
    )
    rows = training.per_device_train_batch_size * training.gradient_accumulation_steps * launch.replicas
    unreal = Unreal(fake.mode)
    with scratch_folder() as folder, ExitStack() as stack:
        trainer = _DryTrainer(
            fake.model,
            training_arguments(recipe, folder),
            objective=objective_of(recipe, fake),
            groups=lambda model: parameter_groups(
                model, recipe.trainable, learning_rate=training.learning_rate, weight_decay=training.weight_decay
            ),
            identity={},
            data_collator=data.collate,
            train_dataset=data.steps(training.max_steps, rows),
        )
        trainer.unreal = unreal
        marks = Marks(trainer, fake.teacher)
        trainer.add_callback(marks)
        stack.enter_context(warnings.catch_warnings())  # accelerate asks where fake weights lie: see create_scheduler
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        if on_gpu:
            stack.enter_context(as_on_gpu())
        stack.enter_context(unreal)
        stack.enter_context(resized_storages(marks.meter.resized))
        stack.enter_context(marks.meter)
        trainer.train()
    return marks


class _DryTrainer(PosswapTrainer):
    """The engine's Trainer, whose losses are no numbers."""

    unreal: Unreal

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the schedule, after the optimizer was given the weights as they are sharded now.

        accelerate finds them by where they lie in memory, and fake ones all lie nowhere.
        """
        assert self.optimizer is not None, "made before its schedule"
        for group, sharded in zip(self.optimizer.param_groups, self.groups(self.model), strict=True):
            group["params"] = sharded["params"]
        return super().create_scheduler(num_training_steps, optimizer)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.unreal.in_step():
            return super().training_step(*args, **kwargs)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = self.objective(model, inputs, num_items_in_batch)
        return (loss, {}) if return_outputs else loss


class Marks(TrainerCallback):
    """Reads the meter where the parts of a step begin and end, from the second step on.

    Args:
        trainer: whose model, gradients and optimizer are held.
        teacher: beside it; None: there is none.
    """

    def __init__(self, trainer: PosswapTrainer, teacher: Any) -> None:
        self.trainer, self.teacher = trainer, teacher
        self.meter = Meter(self._kinds)
        self._parameters: list[Tensor] = []
        self._buffers: list[Tensor] = []
        self._before = Work()
        self._batches: list[list[Work]] = []
        self._steps: list[Work] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = self.trainer.model_wrapped
        self._parameters, self._buffers = list(model.parameters()), list(model.buffers())
        theirs = [] if self.teacher is None else [*self.teacher.parameters(), *self.teacher.buffers()]
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model.register_comm_hook(None, lambda state, bucket: self._send(bucket))
        self.meter.hold([*map(_own, self._parameters), *self._buffers, *theirs])

    def _send(self, bucket: Any) -> Any:
        """Count what DDP sends, and give it back: the fake group gives nothing."""
        gradients = bucket.buffer()
        self.meter.work.sent += ring_bytes(ALL_REDUCE, gradients.numel() * gradients.element_size())
        done = torch.futures.Future[Tensor]()
        done.set_result(gradients)
        return done

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step == 1:
            self.meter.begin()
        self._batches.append([])
        self._before = self.meter.work.copy()

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._batches[-1].append(self._since())

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._batches[-1].append(self._since())

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._steps.append(self._since())

    def _since(self) -> Work:
        done = self.meter.work.since(self._before)
        self._before = self.meter.work.copy()
        return done

    def work_of_steps(self, batches: int) -> tuple[Work, ...]:
        """Return the work of each step but the first, had it `batches` batches."""
        found = []
        for (*first, last), optimizer in list(zip(self._batches, self._steps, strict=True))[1:]:
            whole = Work()
            for part in (*(one.times(batches - 1) for one in first), last, optimizer):
                whole += part
            found.append(whole)
        return tuple(found)

    def _kinds(self) -> dict[int, str]:
        model, optimizer = self.trainer.model_wrapped, self.trainer.optimizer
        assert optimizer is not None, "nothing is asked before the first step"
        gradients = [_own(weight.grad) for weight in self._parameters if weight.grad is not None]
        states = (
            _own(value) for held in optimizer.state.values() for value in held.values() if isinstance(value, Tensor)
        )
        theirs = () if self.teacher is None else self.teacher.parameters()
        groups: dict[str, Iterable[Tensor]] = {
            "optimizer": states, "gradients": [*gradients, *whole_gradients(model)], "buffers": self._buffers,
            "teacher": theirs, "gathered weights": gathered_weights(model), "weights": map(_own, self._parameters),
        }  # fmt: skip
        return {storage_key(one.untyped_storage()): kind for kind, tensors in groups.items() for one in tensors}


def _own(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` that this process holds."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor
