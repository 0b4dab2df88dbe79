"""What a launcher has set up, and what of it this swap cannot be trained under."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hf_posswap.compat.accelerate_state import shard_by_fsdp
from hf_posswap.errors import ConfigError, UnsupportedSwapError
from hf_posswap.training.config import Recipe
from hf_posswap.training.engine.arguments import on_cpu
from hf_posswap.training.engine.deepspeed_config import SAME, configuration, problem_of, said_by, stage_of

_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
_FSDP = "ACCELERATE_USE_FSDP"
_PRECISION = "ACCELERATE_MIXED_PRECISION"
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
    split = _is_on("ACCELERATE_USE_PARALLELISM_CONFIG")
    return Launch(
        processes=_number("WORLD_SIZE", 1),
        fsdp=_number("FSDP_VERSION", 1) if _is_on(_FSDP) else 0,
        deepspeed=stage_of(_launched_deepspeed()) if _is_on(_DEEPSPEED) else 0,
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


def as_launched(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Return `recipe` with what the file of accelerate launch says instead, and a line for each that differs.

    A mixed precision of "no", which accelerate has where its file says nothing, leaves the recipe's. What a
    configuration of DeepSpeed leaves out is the recipe's.

    Args:
        recipe: as a whole.

    Raises:
        ConfigError: a configuration of DeepSpeed is none, or the file asks for float8.
    """
    training, changes, said = recipe.training, dict[str, Any](), list[str]()
    for keys, line in _launched_instead(recipe):
        if any(getattr(training, name) != value for name, value in keys.items()):
            changes |= keys
            said.append(f"accelerate's file wins over the recipe: {line}.")
    theirs = _launched_file() if _is_on(_DEEPSPEED) else None
    if training.deepspeed != theirs and (_is_on(_DEEPSPEED) or _is_on(_FSDP)):
        changes["deepspeed"] = theirs
        if training.deepspeed:
            how = "DeepSpeed as it says" if _is_on(_DEEPSPEED) else "FSDP"
            said.append(f"accelerate's file wins over the recipe: {how}, not training.deepspeed.")
    if not changes:
        return recipe, []
    return dataclasses.replace(recipe, training=dataclasses.replace(training, **changes)), said


def _launched_instead(recipe: Recipe) -> Iterator[tuple[dict[str, Any], str]]:
    """Give the keys of `training` that the launcher's file says too, with its values, and what differs, in words."""
    training, precision = recipe.training, os.environ.get(_PRECISION, "no")
    if precision == "fp8":
        raise ConfigError("accelerate's file asks for mixed_precision fp8, under which no swap was proved: use bf16.")
    if precision in ("bf16", "fp16"):
        keys = {"bf16": precision == "bf16", "fp16": precision == "fp16"}
        yield keys, f"mixed precision {precision}, not {_precision(recipe)}"
    if _is_on(_DEEPSPEED):
        found = said_by(_launched_deepspeed())
        kept: dict[str, Any] = {name: found[name] for name in ("bf16", "fp16") if name in found}
        if kept:
            name = next((name for name, wanted in kept.items() if wanted), "no")
            yield kept, f"mixed precision {name}, not {_precision(recipe)}"
        for name, words in SAME.values():
            if name in found:
                yield {name: found[name]}, f"{words.format(found[name])}, not {getattr(training, name)}"
    if _is_on(_FSDP) and _is_on("FSDP_ACTIVATION_CHECKPOINTING") and recipe.checkpoints_activations:
        names = [name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(training, name)]
        yield dict.fromkeys(names, False), "FSDP makes activations again, not training.gradient_checkpointing"
    compiler = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if compiler != "no":
        mine = training.torch_compile_backend or ("inductor" if training.torch_compile else "no")
        if compiler != mine:
            yield {"torch_compile_backend": compiler}, f"layers compiled by {compiler}, not {mine}"


def _launched_file() -> str | None:
    """Return the file of DeepSpeed's own that accelerate's file names; None: none."""
    named = os.environ.get(_FILE, "none")
    return None if named.lower() == "none" else named


def _launched_deepspeed() -> dict[str, Any]:
    """Return what accelerate's file says of DeepSpeed, as a configuration of DeepSpeed."""
    named = _launched_file()
    if named is not None:
        return configuration(named)
    found: dict[str, Any] = {"zero_optimization": {"stage": _number("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2)}}
    if found["zero_optimization"]["stage"] == 3:
        found["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = _is_on(_SAVES_WHOLE)
    for key, name in _OF_DEEPSPEED.items():
        said = os.environ.get(name, "auto").lower()
        if said not in ("auto", "none", ""):
            found[key] = float(said) if key == "gradient_clipping" else int(said)
    return found


def refuse_deepspeed(recipe: Recipe) -> None:
    """Refuse DeepSpeed where `recipe` would be another training under it, end without a model, or do without it.

    Args:
        recipe: as a whole, as it is launched.

    Raises:
        ConfigError: says what to change.
    """
    given = recipe.training.deepspeed
    if not given and not _is_on(_DEEPSPEED):
        return
    if "RANK" not in os.environ:
        raise ConfigError(
            "training.deepspeed needs a launcher, also for one process: torchrun --nproc_per_node 1 -m hf_posswap.cli "
            "train ..., or accelerate launch."
        )
    if is_launched_on_cpu():
        raise ConfigError(
            "accelerate's file has use_cpu: true, and accelerate leaves DeepSpeed out then without a word: say "
            "use_cpu: false there; a machine without a GPU takes its CPU all the same."
        )
    problem = problem_of(configuration(given) if given else _launched_deepspeed(), recipe)
    if problem:
        raise ConfigError(problem)


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


def refuse_on_cpu(recipe: Recipe, launch: Launch) -> None:
    """Refuse context parallelism where `recipe` is computed on a CPU: torch splits the attention of GPUs alone.

    Raises:
        UnsupportedSwapError: says what works.
    """
    if launch.context > 1 and on_cpu(recipe):
        raise UnsupportedSwapError(
            "context parallelism is not possible on a CPU: torch shares a sequence in its attention kernels for GPUs "
            "alone. Take cp_size: 1 here."
        )


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
