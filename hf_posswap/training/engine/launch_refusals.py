"""Refuses what several processes cannot train correctly."""

from __future__ import annotations

from typing import Any

from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.training.config import Recipe
from hf_posswap.training.engine.arguments import on_cpu
from hf_posswap.training.engine.parallel import Launch


def refuse_silent_errors(recipe: Recipe, scheme: Any, launch: Launch) -> None:
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
    """Refuse context parallelism if `recipe` runs on a CPU: torch supports it only on GPUs.

    Raises:
        UnsupportedSwapError: names an alternative.
    """
    if launch.context > 1 and on_cpu(recipe):
        raise UnsupportedSwapError(
            "context parallelism is not possible on a CPU: torch splits a sequence only in its GPU attention kernels. "
            "Use cp_size: 1 here."
        )


def _splitting(recipe: Recipe, scheme: Any, launch: Launch) -> str | None:
    if launch.context == launch.ulysses == 1:
        return None
    shards = launch.context * launch.ulysses
    parallelism = "context parallelism" if launch.context > 1 else "Ulysses sequence parallelism"
    if scheme is not None and not scheme.traits.shardable:
        is_dynamic = getattr(scheme, "length_dependent", False)
        reason = (
            "its angles depend on the length that a process sees, which differs between processes"
            if is_dynamic
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
    if recipe.objective.kind not in ("next-token",):
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
