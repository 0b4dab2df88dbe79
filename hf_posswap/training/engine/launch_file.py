"""Where a launcher's file and a recipe speak of one thing: the file wins, and says so; what cannot be is refused."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from hf_posswap.errors import ConfigError
from hf_posswap.training.config import Recipe
from hf_posswap.training.engine.deepspeed_config import SAME, configuration, problem_of, said_by
from hf_posswap.training.engine.parallel import (
    DEEPSPEED,
    FSDP,
    is_launched_on_cpu,
    is_on,
    launched_deepspeed,
    launched_file,
)  # fmt: skip

_PRECISION = "ACCELERATE_MIXED_PRECISION"


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
    theirs = launched_file() if is_on(DEEPSPEED) else None
    if training.deepspeed != theirs and (is_on(DEEPSPEED) or is_on(FSDP)):
        changes["deepspeed"] = theirs
        if training.deepspeed:
            how = "DeepSpeed as it says" if is_on(DEEPSPEED) else "FSDP"
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
    if is_on(DEEPSPEED):
        found = said_by(launched_deepspeed())
        kept: dict[str, Any] = {name: found[name] for name in ("bf16", "fp16") if name in found}
        if kept:
            name = next((name for name, wanted in kept.items() if wanted), "no")
            yield kept, f"mixed precision {name}, not {_precision(recipe)}"
        for name, words in SAME.values():
            if name in found:
                yield {name: found[name]}, f"{words.format(found[name])}, not {getattr(training, name)}"
    if is_on(FSDP) and is_on("FSDP_ACTIVATION_CHECKPOINTING") and recipe.checkpoints_activations:
        names = [name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(training, name)]
        yield dict.fromkeys(names, False), "FSDP makes activations again, not training.gradient_checkpointing"
    compiler = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if compiler != "no":
        mine = training.torch_compile_backend or ("inductor" if training.torch_compile else "no")
        if compiler != mine:
            yield {"torch_compile_backend": compiler}, f"layers compiled by {compiler}, not {mine}"


def refuse_deepspeed(recipe: Recipe) -> None:
    """Refuse DeepSpeed where `recipe` would be another training under it, end without a model, or do without it.

    Args:
        recipe: as a whole, as it is launched.

    Raises:
        ConfigError: says what to change.
    """
    given = recipe.training.deepspeed
    if not given and not is_on(DEEPSPEED):
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
    problem = problem_of(configuration(given) if given else launched_deepspeed(), recipe)
    if problem:
        raise ConfigError(problem)


def _precision(recipe: Recipe) -> str:
    return "bf16" if recipe.training.bf16 else "fp16" if recipe.training.fp16 else "no"
