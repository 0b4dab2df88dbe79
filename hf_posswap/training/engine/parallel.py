"""What a launcher has set up, and what of it this swap cannot be trained under."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posswap.compat.accelerate_state import shard_by_fsdp
from hf_posswap.errors import CheckpointError, ConfigError, UnsupportedSwapError
from hf_posswap.training.config import Recipe
from hf_posswap.utils.atomic_io import read_json

_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
_PRECISION = "ACCELERATE_MIXED_PRECISION"
_CPU = "ACCELERATE_USE_CPU"
_ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"


@dataclass(frozen=True)
class Launch:
    """How a launcher (accelerate, torchrun) has started this process.

    Attributes:
        processes: in all.
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
        """Processes that read windows of their own."""
        return self.processes // (self.context * self.ulysses)

    @property
    def shards(self) -> bool:
        """Whether no process holds all weights."""
        return bool(self.fsdp) or self.deepspeed == 3


def launch_of_environment() -> Launch:
    """Return what the environment of this process says."""
    split = _is_on("ACCELERATE_USE_PARALLELISM_CONFIG")
    return Launch(
        processes=_number("WORLD_SIZE", 1),
        fsdp=_number("FSDP_VERSION", 1) if _is_on("ACCELERATE_USE_FSDP") else 0,
        deepspeed=_number("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2) if _is_on(_DEEPSPEED) else 0,
        context=_number("PARALLELISM_CONFIG_CP_SIZE", 1) if split else 1,
        ulysses=_number("PARALLELISM_CONFIG_SP_SIZE", 1) if split else 1,
    )


def launch_of(recipe: Recipe) -> Launch:
    """Return how this process was started, with the ZeRO stage that `recipe` itself brings.

    Raises:
        ConfigError: training.deepspeed is no readable configuration.
    """
    launch, given = launch_of_environment(), recipe.training.deepspeed
    if launch.deepspeed or not given:
        return launch
    try:
        held = given if isinstance(given, dict) else read_json(Path(given).expanduser())
        stage = int(held.get("zero_optimization", {}).get("stage", 0))
    except (CheckpointError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"training.deepspeed: {error}") from error
    return dataclasses.replace(launch, deepspeed=stage)


def as_launched(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Return `recipe` with what the file of accelerate launch says instead, and a line for each that differs.

    A mixed precision of "no", which accelerate has where its file says nothing, leaves the recipe's.

    Args:
        recipe: as a whole.
    """
    training, wins = recipe.training, "accelerate's file wins over the recipe: "
    changes: dict[str, Any] = {}
    said = []
    precision, mine = os.environ.get(_PRECISION, "no"), _precision(recipe)
    if precision in ("bf16", "fp16") and precision != mine:
        changes |= {"bf16": precision == "bf16", "fp16": precision == "fp16"}
        said.append(f"{wins}mixed precision {precision}, not {mine}.")
    batches = _number(_ACCUMULATION, 0) if _is_on(_DEEPSPEED) else 0
    if batches and batches != training.gradient_accumulation_steps:
        changes["gradient_accumulation_steps"] = batches
        said.append(f"{wins}{batches} batches a step, not {training.gradient_accumulation_steps}.")
    if training.deepspeed and (_is_on(_DEEPSPEED) or _is_on("ACCELERATE_USE_FSDP")):
        changes["deepspeed"] = None
        said.append(f"{wins}{'DeepSpeed as it says' if _is_on(_DEEPSPEED) else 'FSDP'}, not training.deepspeed.")
    if not changes:
        return recipe, []
    return dataclasses.replace(recipe, training=dataclasses.replace(training, **changes)), said


def is_launched_on_cpu() -> bool:
    """Return whether a launcher's file asks for a CPU."""
    return _is_on(_CPU)


def _precision(recipe: Recipe) -> str:
    return "bf16" if recipe.training.bf16 else "fp16" if recipe.training.fp16 else "no"


def _is_on(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("true", "1", "yes")


def _number(name: str, default: int) -> int:
    said = os.environ.get(name) or ""
    return int(said) if said.isdigit() else default


def shard_on_cpus(accelerator: Any) -> bool:
    """Turn FSDP2 on where a launcher asked for it and accelerate took DDP because there are only CPUs.

    Args:
        accelerator: of this process.

    Returns:
        Whether weights are sharded so.
    """
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    if not launch_of_environment().fsdp or accelerator.distributed_type != DistributedType.MULTI_CPU:
        return False
    plugin = FullyShardedDataParallelPlugin()  # from the launcher's environment
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    shard_by_fsdp(plugin)
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def refuse_silent_errors(recipe: Recipe, scheme: Any, launch: Launch) -> None:
    """Refuse what the engine would compute wrongly without a word under `launch`.

    Args:
        recipe: without stages.
        scheme: that the swap puts in, resolved; None: no swap.
        launch: how the process was started.

    Raises:
        UnsupportedSwapError: names the scheme or the setting, and what works.
    """
    for refused in (_splitting(recipe, scheme, launch), _sharding(recipe, launch)):
        if refused:
            raise UnsupportedSwapError(refused)


def _splitting(recipe: Recipe, scheme: Any, launch: Launch) -> str | None:
    if launch.context == launch.ulysses == 1:
        return None
    pieces = launch.context * launch.ulysses
    kind = "context parallelism" if launch.context > 1 else "Ulysses sequence parallelism"
    if scheme is not None and not scheme.traits.shardable:
        dynamic = getattr(scheme, "length_dependent", False)
        why = (
            "its angles follow the length that each process sees, and they see different ones"
            if dynamic
            else "accelerate's hook drops the mask that carries a bias, and pieces need the whole sequence"
        )
        return (
            f"{scheme.name} cannot be trained under {kind}: {why}. Use a scheme whose rotation follows from a token's "
            "own position (rope, linear, ntk, yarn, longrope below its own length), or no sequence parallelism."
        )
    if recipe.data.packing == "documents":
        return f"data.packing documents cannot be trained under {kind}: the mask between documents would be dropped."
    if recipe.objective.kind not in ("next-token",):
        return f"objective.kind {recipe.objective.kind} cannot be trained under {kind}: only next-token can."
    if recipe.objective.chunk:
        return f"objective.chunk must be 0 under {kind}: labels are shifted before the sequence is split."
    for length in recipe.data.lengths:
        if length % (2 * pieces):
            said = "" if length == recipe.data.length else f", cut into windows of {length},"
            return (
                f"data.length {recipe.data.length}{said} must be a multiple of {2 * pieces} under {kind} by {pieces}."
            )
    return None


def _sharding(recipe: Recipe, launch: Launch) -> str | None:
    if launch.fsdp == 1:
        return "FSDP version 1 is not supported: it flattens the parameters a swap adds. Set fsdp_version: 2."
    if launch.shards and recipe.swap.gradual_steps:
        return "a gradual swap cannot be ended where weights are sharded (FSDP, ZeRO-3): use DDP or one process."
    if launch.shards and recipe.what == "new_rows":
        return "trainable.what new_rows masks rows of a gradient, which sharding cuts: use DDP or one process."
    if launch.shards and (recipe.training.eval_strategy != "no" or recipe.training.eval_on_start):
        return "training.eval_strategy needs whole weights, and they are sharded: leave it no; the end is measured."
    if launch.shards and recipe.objective.kind in ("distill", "embedding"):
        return f"objective.kind {recipe.objective.kind} needs the unswapped model whole beside a sharded one: use DDP."
    return None
