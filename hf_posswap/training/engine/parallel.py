"""What a launcher (accelerate, torchrun) has set up for this process, read from its environment."""

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
    def sharding(self) -> str | None:
        """Whose checkpoints it writes; None: a plain Trainer's. Another would go on with a part of them alone."""
        return f"ZeRO-{self.deepspeed}" if self.deepspeed else f"FSDP{self.fsdp}" if self.fsdp else None

    @property
    def shards(self) -> bool:
        """Whether no process holds all weights."""
        return bool(self.fsdp) or self.deepspeed == 3


def launch_of_environment() -> Launch:
    """Return what the environment of this process says."""
    split = is_on("ACCELERATE_USE_PARALLELISM_CONFIG")
    return Launch(
        processes=_number("WORLD_SIZE", 1),
        fsdp=_number("FSDP_VERSION", 1) if is_on(FSDP) else 0,
        deepspeed=stage_of(launched_deepspeed()) if is_on(DEEPSPEED) else 0,
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
    return dataclasses.replace(launch, deepspeed=stage_of(configuration(given)))


def launched_file() -> str | None:
    """Return the file of DeepSpeed's own that accelerate's file names; None: none."""
    named = os.environ.get(_FILE, "none")
    return None if named.lower() == "none" else named


def launched_deepspeed() -> dict[str, Any]:
    """Return what accelerate's file says of DeepSpeed, as a configuration of DeepSpeed."""
    named = launched_file()
    if named is not None:
        return configuration(named)
    found: dict[str, Any] = {"zero_optimization": {"stage": _number("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2)}}
    if found["zero_optimization"]["stage"] == 3:
        found["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = is_on(_SAVES_WHOLE)
    for key, name in _OF_DEEPSPEED.items():
        said = os.environ.get(name, "auto").lower()
        if said not in ("auto", "none", ""):
            found[key] = float(said) if key == "gradient_clipping" else int(said)
    return found


@contextmanager
def environment_kept() -> Iterator[None]:
    """Take back in the end what accelerate writes into the environment in the block: the next run would read it."""
    before = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("ACCELERATE_") and name not in before]:
            del os.environ[name]
        os.environ.update(before)


def is_launched_on_cpu() -> bool:
    """Return whether a launcher's file asks for a CPU."""
    return is_on(_CPU)


def is_on(name: str) -> bool:
    """Return whether the environment's variable `name` says yes."""
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


def collator_of(launch: Launch, collate: Collate) -> Collate:
    """Return `collate`, whose batches under Ulysses also say positions [B, L]: DeepSpeed cuts them with the tokens.

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
