"""What cannot be trained right by the processes that a launcher has started, refused by name."""

from __future__ import annotations

from typing import Any

from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.training.config import Recipe
from hf_posswap.training.engine.arguments import on_cpu
from hf_posswap.training.engine.parallel import Launch


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
