"""How a launcher (accelerate, torchrun) started this process, and what several processes cannot train.

Where a launcher's file and a recipe conflict, the file wins with a message; impossible settings are refused.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_posswap.compat.accelerate_state import shard_by_fsdp
from hf_posswap.errors import ConfigError, UnsupportedSwapError
from hf_posswap.training.config import Recipe
from hf_posswap.training.engine.arguments import SAME, configuration, decided_settings, on_cpu, problem_of, stage_of

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

    from hf_posswap.schemes.base import Scheme

DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
FSDP = "ACCELERATE_USE_FSDP"
_CPU = "ACCELERATE_USE_CPU"
_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
_SAVES_WHOLE = "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"
_OF_DEEPSPEED = {
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
}

Collate = Callable[[list[Any]], dict[str, Any]]
"""From the items of a batch to the arguments of a forward."""
_PRECISION = "ACCELERATE_MIXED_PRECISION"


@dataclass(frozen=True)
class Launch:
    """How a launcher (accelerate, torchrun) started this process.

    Attributes:
        processes: total number.
        fsdp: version of FSDP; 0: none.
        deepspeed: ZeRO stage; 0: no DeepSpeed.
        context: processes that share one sequence by torch's context parallelism.
        ulysses: processes that share one sequence by DeepSpeed's Ulysses.
    """

    processes: int = 1
    fsdp: int = 0
    deepspeed: int = 0
    context: int = 1
    ulysses: int = 1

    @property
    def replicas(self) -> int:
        """Groups of processes that each read different windows."""
        return self.processes // (self.context * self.ulysses)

    @property
    def sharding(self) -> str | None:
        """The format of its sharded checkpoints, which no other launch can resume from; None: a plain Trainer's."""
        return f"ZeRO-{self.deepspeed}" if self.deepspeed else f"FSDP{self.fsdp}" if self.fsdp else None

    @property
    def shards(self) -> bool:
        """Whether weights are sharded over processes."""
        return bool(self.fsdp) or self.deepspeed == 3


def launch_of_environment() -> Launch:
    """Return the launch by the environment of this process."""
    split = is_on("ACCELERATE_USE_PARALLELISM_CONFIG")
    return Launch(
        processes=_number("WORLD_SIZE", 1),
        fsdp=_number("FSDP_VERSION", 1) if is_on(FSDP) else 0,
        deepspeed=stage_of(launched_deepspeed()) if is_on(DEEPSPEED) else 0,
        context=_number("PARALLELISM_CONFIG_CP_SIZE", 1) if split else 1,
        ulysses=_number("PARALLELISM_CONFIG_SP_SIZE", 1) if split else 1,
    )


def launch_of(recipe: Recipe) -> Launch:
    """Return how this process was started, with the ZeRO stage of `recipe` if the launcher sets none.

    Raises:
        ConfigError: training.deepspeed is not a readable configuration.
    """
    launch, given = launch_of_environment(), recipe.training.deepspeed
    if launch.deepspeed or not given:
        return launch
    return dataclasses.replace(launch, deepspeed=stage_of(configuration(given)))


def launched_file() -> str | None:
    """Return the DeepSpeed file that accelerate's file names, or None."""
    path = os.environ.get(_FILE, "none")
    return None if path.lower() == "none" else path


def launched_deepspeed() -> dict[str, object]:
    """Return the DeepSpeed settings of accelerate's file as a configuration of DeepSpeed."""
    path = launched_file()
    if path is not None:
        return configuration(path)
    config: dict[str, Any] = {"zero_optimization": {"stage": _number("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2)}}
    if config["zero_optimization"]["stage"] == 3:
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = is_on(_SAVES_WHOLE)
    for key, name in _OF_DEEPSPEED.items():
        value = os.environ.get(name, "auto").lower()
        if value not in ("auto", "none", ""):
            config[key] = float(value) if key == "gradient_clipping" else int(value)
    return config


@contextmanager
def environment_kept() -> Iterator[None]:
    """Restore, after the block, the environment variables that accelerate sets, so that no later run reads them."""
    previous = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("ACCELERATE_") and name not in previous]:
            del os.environ[name]
        os.environ.update(previous)


def is_launched_on_cpu() -> bool:
    """Return whether the launcher's file sets use_cpu."""
    return is_on(_CPU)


def is_on(name: str) -> bool:
    """Return whether the environment variable `name` is true."""
    return os.environ.get(name, "false").lower() in ("true", "1", "yes")


def _number(name: str, default: int) -> int:
    value = os.environ.get(name) or ""
    return int(value) if value.isdigit() else default


def shard_on_cpus(accelerator: Accelerator) -> bool:
    """Turn FSDP2 on if a launcher requested it and accelerate chose DDP because there are only CPUs.

    Args:
        accelerator: of this process.

    Returns:
        Whether weights are sharded by FSDP now.
    """
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    if not launch_of_environment().fsdp or accelerator.distributed_type != DistributedType.MULTI_CPU:
        return False
    plugin = FullyShardedDataParallelPlugin()  # from the launcher's environment
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    shard_by_fsdp(plugin)
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def collator_of(launch: Launch, collate: Collate) -> Collate:
    """Return `collate`; under Ulysses its batches get positions [B, L], which DeepSpeed splits with the tokens.

    Args:
        launch: how the process was started.
        collate: of the data.
    """
    if launch.ulysses == 1:
        return collate

    def with_positions(items: list[object]) -> dict[str, Tensor]:
        batch = collate(items)
        tokens = batch["input_ids"]  # [B, L]
        return {"position_ids": torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()} | batch

    return with_positions


def as_launched(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Return `recipe` with the settings of the accelerate launch file, and a line for each difference.

    A mixed precision of "no", accelerate's default, keeps the recipe's, as do values that a configuration of DeepSpeed
    leaves out.

    Args:
        recipe: as a whole.

    Raises:
        ConfigError: a configuration of DeepSpeed is invalid, or the file asks for float8.
    """
    training, changes, messages = recipe.training, dict[str, Any](), list[str]()
    for keys, line in _file_settings(recipe):
        if any(getattr(training, name) != value for name, value in keys.items()):
            changes |= keys
            messages.append(f"accelerate's file wins over the recipe: {line}.")
    launcher_config = launched_file() if is_on(DEEPSPEED) else None
    if training.deepspeed != launcher_config and (is_on(DEEPSPEED) or is_on(FSDP)):
        changes["deepspeed"] = launcher_config
        if training.deepspeed:
            engine_text = "DeepSpeed as it says" if is_on(DEEPSPEED) else "FSDP"
            messages.append(f"accelerate's file wins over the recipe: {engine_text}, not training.deepspeed.")
    if not changes:
        return recipe, []
    return dataclasses.replace(recipe, training=dataclasses.replace(training, **changes)), messages


def _file_settings(recipe: Recipe) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the keys and values of `training` that the launcher's file sets, and a description of the difference."""
    training, precision = recipe.training, os.environ.get(_PRECISION, "no")
    if precision == "fp8":
        raise ConfigError("accelerate's file asks for mixed_precision fp8, which no swap was tested with: use bf16.")
    if precision in ("bf16", "fp16"):
        keys = {"bf16": precision == "bf16", "fp16": precision == "fp16"}
        yield keys, f"mixed precision {precision}, not {_precision(recipe)}"
    if is_on(DEEPSPEED):
        decided = decided_settings(launched_deepspeed())
        precisions: dict[str, object] = {name: decided[name] for name in ("bf16", "fp16") if name in decided}
        if precisions:
            name = next((name for name, is_enabled in precisions.items() if is_enabled), "no")
            yield precisions, f"mixed precision {name}, not {_precision(recipe)}"
        for name, description in SAME.values():
            if name in decided:
                yield {name: decided[name]}, f"{description.format(decided[name])}, not {getattr(training, name)}"
    if is_on(FSDP) and is_on("FSDP_ACTIVATION_CHECKPOINTING") and recipe.checkpoints_activations:
        names = [name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(training, name)]
        yield dict.fromkeys(names, False), "FSDP checkpoints activations, not training.gradient_checkpointing"
    compiler = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if compiler != "no":
        recipe_compiler = training.torch_compile_backend or ("inductor" if training.torch_compile else "no")
        if compiler != recipe_compiler:
            yield {"torch_compile_backend": compiler}, f"layers compiled by {compiler}, not {recipe_compiler}"


def refuse_deepspeed(recipe: Recipe) -> None:
    """Refuse DeepSpeed if it would change the training, could not save a model, or would silently not be used.

    Args:
        recipe: as a whole, with the launcher's settings.

    Raises:
        ConfigError: with the setting to change.
    """
    given = recipe.training.deepspeed
    if not given and not is_on(DEEPSPEED):
        return
    if "RANK" not in os.environ:
        raise ConfigError(
            "training.deepspeed needs a launcher, also for one process: torchrun --nproc_per_node 1 -m hf_posswap "
            "train ..., or accelerate launch."
        )
    if is_launched_on_cpu():
        raise ConfigError(
            "accelerate's file has use_cpu: true, with which accelerate silently ignores DeepSpeed: set use_cpu: false "
            "there; a machine without a GPU still uses its CPU."
        )
    problem = problem_of(configuration(given) if given else launched_deepspeed(), recipe)
    if problem:
        raise ConfigError(problem)


def _precision(recipe: Recipe) -> str:
    return "bf16" if recipe.training.bf16 else "fp16" if recipe.training.fp16 else "no"


def refuse_silent_errors(recipe: Recipe, scheme: Scheme | None, launch: Launch) -> None:
    """Refuse what would be silently wrong under `launch`.

    Args:
        recipe: without stages.
        scheme: of the swap, resolved; None: no swap.
        launch: how the process was started.

    Raises:
        UnsupportedSwapError: names the scheme or the setting, and an alternative.
    """
    for problem in (_splitting(recipe, scheme, launch), _sharding(recipe, launch)):
        if problem:
            raise UnsupportedSwapError(problem)


def refuse_on_cpu(recipe: Recipe, launch: Launch) -> None:
    """Refuse what needs a GPU if `recipe` runs on a CPU: context parallelism, and fp16.

    Raises:
        UnsupportedSwapError, ConfigError: names an alternative.
    """
    if recipe.training.fp16 and on_cpu(recipe):
        raise ConfigError(
            "training.fp16: it is for GPUs, and on a CPU accelerate trains in float32 without saying so. Use "
            "training.bf16=true, or leave it out, here and in accelerate's file."
        )
    if launch.context > 1 and on_cpu(recipe):
        raise UnsupportedSwapError(
            "context parallelism is not possible on a CPU: torch splits a sequence only in its GPU attention kernels. "
            "Use cp_size: 1 here."
        )


def _splitting(recipe: Recipe, scheme: Scheme | None, launch: Launch) -> str | None:
    if launch.context == launch.ulysses == 1:
        return None
    shards = launch.context * launch.ulysses
    parallelism = "context parallelism" if launch.context > 1 else "Ulysses sequence parallelism"
    if scheme is not None and not scheme.traits.shardable:
        reason = (
            "its angles depend on the length that a process sees, which differs between processes"
            if getattr(scheme, "length_dependent", False)
            else "accelerate's hook drops the mask that holds the bias, and a shard would need all of it"
        )
        return (
            f"{scheme.name} cannot be trained under {parallelism}: {reason}. Use a scheme that rotates "
            "by a token's position alone (rope, linear, ntk, yarn, longrope below its original length), or no sequence "
            "parallelism."
        )
    if recipe.data.packing == "documents":
        return (
            f"data.packing documents cannot be trained under {parallelism}: the mask between documents would be "
            "dropped."
        )
    if recipe.objective.kind != "next-token":
        return f"objective.kind {recipe.objective.kind} cannot be trained under {parallelism}: only next-token can."
    if recipe.objective.chunk:
        return f"objective.chunk must be 0 under {parallelism}: labels are shifted before the sequence is split."
    for length in recipe.data.lengths:
        if length % (2 * shards):
            cut_text = "" if length == recipe.data.length else f", cut into windows of {length},"
            return (
                f"data.length {recipe.data.length}{cut_text} must be a multiple of {2 * shards} under {parallelism} "
                f"by {shards}."
            )
    return None


def _sharding(recipe: Recipe, launch: Launch) -> str | None:
    if launch.fsdp == 1:
        return "FSDP version 1 is not supported: it flattens the parameters a swap adds. Set fsdp_version: 2."
    if launch.shards and recipe.swap.gradual_steps:
        return "a gradual swap cannot end on sharded weights (FSDP, ZeRO-3): use DDP or one process."
    if launch.shards and recipe.what == "new_rows":
        return "trainable.what new_rows masks rows of a gradient, which sharding splits: use DDP or one process."
    if launch.shards and (recipe.training.eval_strategy != "no" or recipe.training.eval_on_start):
        return "training.eval_strategy needs unsharded weights: set it to no; the finished model is evaluated."
    if launch.deepspeed == 3 and recipe.objective.kind == "longce":
        return "objective.kind longce runs the head by chunks, whose weights ZeRO-3 releases: use FSDP2 or DDP."
    if launch.shards and recipe.objective.kind in ("distill", "embedding"):
        return f"objective.kind {recipe.objective.kind} needs an unsharded teacher with a sharded model: use DDP."
    return None
