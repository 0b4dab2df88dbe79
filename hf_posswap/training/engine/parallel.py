"""Reads from the environment how a launcher (accelerate, torchrun) started this process."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hf_posswap.compat.accelerate_state import shard_by_fsdp
from hf_posswap.training.config import Recipe
from hf_posswap.training.engine.deepspeed_config import configuration, stage_of

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


def launched_deepspeed() -> dict[str, Any]:
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


def shard_on_cpus(accelerator: Any) -> bool:
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

    def with_positions(items: list[Any]) -> dict[str, Any]:
        batch = collate(items)
        tokens = batch["input_ids"]  # [B, L]
        return {"position_ids": torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()} | batch

    return with_positions
