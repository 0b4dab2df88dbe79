"""Runs a few steps of a recipe through the engine's Trainer on fake tensors, and measures memory and work."""

from __future__ import annotations

import dataclasses
import random
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
from hf_posswap.compat.torch_processes import gathered_weights, whole_gradients
from hf_posswap.compat.torch_tensors import cannot_be_fake
from hf_posswap.errors import UnsupportedModelError
from hf_posswap.training.config import Recipe
from hf_posswap.training.dryrun.meter import ALL_REDUCE, Memory, Meter, Work, ring_bytes
from hf_posswap.training.dryrun.modelling import FakeModel, fake_model, objective_of, synthetic_windows
from hf_posswap.training.dryrun.unreal import FakeStep, as_on_gpu
from hf_posswap.training.engine.arguments import training_arguments
from hf_posswap.training.engine.parallel import Launch
from hf_posswap.training.engine.trainer import PosswapTrainer
from hf_posswap.training.trainable import parameter_groups
from hf_posswap.utils.atomic_io import scratch_folder
from hf_posswap.utils.threads import PROCESS, ignored_warnings

_BATCHES = 2
"""Most batches run per step: those between the first and the last cost as much as the first."""


@dataclass(frozen=True)
class RehearsalResult:
    """The memory and work of one process.

    Attributes:
        memory: at the peak, by kinds.
        work: of an optimizer step, for each window length that the recipe alternates.
        tokens: of one optimizer step.
    """

    memory: Memory
    work: tuple[Work, ...]
    tokens: int


def rehearse(recipe: Recipe, launch: Launch, *, on_gpu: bool) -> RehearsalResult:
    """Return the memory and work of steps of `recipe`, after a first step that allocates the optimizer's state.

    Args:
        recipe: without stages, as launched.
        launch: how processes share the training.
        on_gpu: whether the training runs on a GPU.

    Raises:
        PosswapError: the recipe itself is refused.
        UnsupportedModelError: the step depends on values that are computed from weights.
    """
    batches = recipe.training.gradient_accumulation_steps
    short_recipe = _short(recipe, on_gpu)
    try:
        with _seeded(recipe.training.seed):
            marks = _run(short_recipe, fake_model(recipe, launch), launch, on_gpu)
    except cannot_be_fake() as error:
        raise UnsupportedModelError(
            f"{recipe.model.name} cannot be dry-run: its step depends on values computed from weights ({error})."
        ) from error
    rows = recipe.training.per_device_train_batch_size * batches
    return RehearsalResult(marks.meter.settle(), marks.work_of_steps(batches), rows * recipe.data.length)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed all generators within the block; restore them, and torch's threads, which accelerate sets, afterwards."""
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
    """Return `recipe` with one step for each window length, and without saving, logging or evaluation."""
    training = recipe.training
    values: dict[str, Any] = {
        "max_steps": 1 + len(recipe.data.cut),
        "gradient_accumulation_steps": min(training.gradient_accumulation_steps, _BATCHES),
        "optim": training.optim or ("adamw_torch_fused" if on_gpu else None),
        "use_cpu": True,
        "bf16": training.bf16 or training.fp16,  # the same size; on a CPU float16 would silently be float32
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
    data = synthetic_windows(
        recipe.data,
        fake.model.config.get_text_config(),
        causal=geometry.causal,
        scheme_length=fake.plan.max_length if fake.plan else geometry.original_length,
        first_position=fake.sites.first_position,
        dtype=fake.model.dtype,
    )
    rows = training.per_device_train_batch_size * training.gradient_accumulation_steps * launch.replicas
    fake_step = FakeStep(fake.mode)
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
        trainer.fake_step = fake_step
        marks = Marks(trainer, fake.teacher)
        trainer.add_callback(marks)
        # accelerate reads pointers of fake weights: see create_scheduler
        stack.enter_context(ignored_warnings("Accessing the data pointer of FakeTensor", UserWarning))
        if on_gpu:
            stack.enter_context(as_on_gpu())
        stack.enter_context(fake_step)
        stack.enter_context(resized_storages(marks.meter.resized))
        stack.enter_context(marks.meter)
        trainer.train()
    return marks


class _DryTrainer(PosswapTrainer):
    """The engine's Trainer, without checks of the loss, which is fake."""

    fake_step: FakeStep

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Create the schedule, after giving the optimizer the sharded weights.

        accelerate matches weights by data pointer, and fake weights have none.
        """
        assert self.optimizer is not None, "created before its schedule"
        for group, sharded in zip(self.optimizer.param_groups, self.groups(self.model), strict=True):
            group["params"] = sharded["params"]
        return super().create_scheduler(num_training_steps, optimizer)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.fake_step.in_step():
            return super().training_step(*args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, object],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        loss = self.objective(model, inputs, num_items_in_batch)
        return (loss, {}) if return_outputs else loss


class Marks(TrainerCallback):
    """Reads the meter where batches and steps begin and end, from the second step on.

    Args:
        trainer: holds the model, the gradients and the optimizer.
        teacher: the unswapped model; None: there is none.
    """

    def __init__(self, trainer: PosswapTrainer, teacher: nn.Module) -> None:
        self.trainer, self.teacher = trainer, teacher
        self.meter = Meter(self._kinds)
        self._parameters: list[Tensor] = []
        self._buffers: list[Tensor] = []
        self._before = Work()
        self._batches: list[list[Work]] = []
        self._steps: list[Work] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        model = self.trainer.model_wrapped
        self._parameters, self._buffers = list(model.parameters()), list(model.buffers())
        teacher_tensors = [] if self.teacher is None else [*self.teacher.parameters(), *self.teacher.buffers()]
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model.register_comm_hook(None, lambda state, bucket: self._send(bucket))
        self.meter.hold([*map(_local, self._parameters), *self._buffers, *teacher_tensors])

    def _send(self, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
        """Count the bytes that DDP sends, and return the bucket: the fake group returns nothing."""
        gradients = bucket.buffer()
        self.meter.work.sent += ring_bytes(ALL_REDUCE, gradients.numel() * gradients.element_size())
        done = torch.futures.Future[Tensor]()
        done.set_result(gradients)
        return done

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if state.global_step == 1:
            self.meter.begin()
        self._batches.append([])
        self._before = self.meter.work.copy()

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._batches[-1].append(self._since())

    on_pre_optimizer_step = on_substep_end

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._steps.append(self._since())

    def _since(self) -> Work:
        done = self.meter.work.since(self._before)
        self._before = self.meter.work.copy()
        return done

    def work_of_steps(self, batches: int) -> tuple[Work, ...]:
        """Return the work of each step but the first, extrapolated to `batches` batches."""
        steps = []
        for (*earlier_batches, last_batch), optimizer in list(zip(self._batches, self._steps, strict=True))[1:]:
            step = Work()
            for work in (*(batch.times(batches - 1) for batch in earlier_batches), last_batch, optimizer):
                step += work
            steps.append(step)
        return tuple(steps)

    def _kinds(self) -> dict[int, str]:
        model, optimizer = self.trainer.model_wrapped, self.trainer.optimizer
        assert optimizer is not None, "not called before the first step"
        gradients = [_local(weight.grad) for weight in self._parameters if weight.grad is not None]
        states = (
            _local(value) for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
        )
        teacher_parameters = () if self.teacher is None else self.teacher.parameters()
        groups: dict[str, Iterable[Tensor]] = {
            "optimizer": states, "gradients": [*gradients, *whole_gradients(model)], "buffers": self._buffers,
            "teacher": teacher_parameters, "gathered weights": gathered_weights(model),
            "weights": map(_local, self._parameters),
        }  # fmt: skip
        return {storage_key(tensor.untyped_storage()): name for name, tensors in groups.items() for tensor in tensors}


def _local(tensor: Tensor) -> Tensor:
    """Return the local shard of `tensor`."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor
