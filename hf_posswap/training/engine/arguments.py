"""Builds transformers' TrainingArguments from a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments, get_scheduler

from hf_posswap.compat.transformers_trainer import checkpointing_argument, use_one_gpu
from hf_posswap.errors import ConfigError
from hf_posswap.training.config import Recipe
from hf_posswap.training.config.theirs import REFUSED, THEIRS, non_default_settings
from hf_posswap.training.engine.deepspeed_config import completed, configuration

_OLD_NAME = "gradient_checkpointing"


def training_arguments(recipe: Recipe, folder: Path) -> TrainingArguments:
    """Return the arguments of a Trainer that saves checkpoints in `folder`: `training` and the fixed values.

    Args:
        recipe: without stages.
        folder: for checkpoints.

    Raises:
        ConfigError: transformers refuses the values, or cannot meet them on this machine.
    """
    try:
        arguments = TrainingArguments(**argument_values(recipe, folder))
        _try_schedule(arguments)
    except (ValueError, ImportError, TypeError, OSError, NotImplementedError) as error:
        raise ConfigError(f"training: {' '.join(str(error).split())}") from error
    use_one_gpu(arguments)  # a process without a launcher may see several
    return arguments


def _try_schedule(arguments: TrainingArguments) -> None:
    """Build the schedule for a dummy optimizer, so that bad arguments are refused before a model loads."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=arguments.learning_rate)
    warmup = arguments.get_warmup_steps(arguments.max_steps)
    steps: dict[str, Any] = {"num_warmup_steps": warmup, "num_training_steps": arguments.max_steps}
    scheduler_kwargs: Any = arguments.lr_scheduler_kwargs
    get_scheduler(arguments.lr_scheduler_type, optimizer, **steps, scheduler_specific_kwargs=scheduler_kwargs)


def argument_values(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Return the arguments of TrainingArguments that differ from its defaults, so that no deprecated name is passed."""
    fixed = {name: used for name, (used, _) in REFUSED.items() if used is not None and name in THEIRS}
    values = fixed | {
        name: value for name, value in non_default_settings(recipe.training).items() if value != THEIRS[name]
    }
    values |= {"output_dir": str(folder), "data_seed": recipe.data.seed, "use_cpu": on_cpu(recipe)}
    values["optim"] = recipe.training.optim or ("adamw_torch" if on_cpu(recipe) else "adamw_torch_fused")
    if recipe.training.deepspeed:
        values["deepspeed"] = completed(configuration(recipe.training.deepspeed))
    if on_cpu(recipe):
        values["dataloader_pin_memory"] = False  # batches stay on the CPU
    return _with_checkpointing(values, recipe)


def on_cpu(recipe: Recipe) -> bool:
    """Return whether `recipe` runs on the CPU, by `use_cpu` or because there is no accelerator."""
    return recipe.training.use_cpu or not (torch.cuda.is_available() or torch.backends.mps.is_available())


def _with_checkpointing(values: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return `values` with activation checkpointing under the name that this transformers uses.

    Raises:
        ConfigError: this transformers does not support the options.
    """
    name = checkpointing_argument()
    for old in (_OLD_NAME, f"{_OLD_NAME}_kwargs"):
        if old in values:
            option = values.pop(old)
            values.setdefault(old.replace(_OLD_NAME, name), option)
    if not recipe.checkpoints_activations:
        return values
    options = {"use_reentrant": False} | dict(values.get(f"{name}_kwargs") or {})
    if "offload" in options and on_cpu(recipe):
        del options["offload"]  # activations are there already
    if "offload" in options and name == _OLD_NAME:
        raise ConfigError(
            f"training.{_OLD_NAME}_kwargs: offload needs a later transformers: update it, or leave it out."
        )
    return values | {f"{name}_kwargs": options}
