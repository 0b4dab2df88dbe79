"""Conflicts between a launcher's file and a recipe: the file wins with a message; impossible settings are refused."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from hf_posswap.errors import ConfigError
from hf_posswap.training.config import Recipe
from hf_posswap.training.engine.deepspeed_config import SAME, configuration, decided_settings, problem_of
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
        precisions: dict[str, Any] = {name: decided[name] for name in ("bf16", "fp16") if name in decided}
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
