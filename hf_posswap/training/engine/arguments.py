"""From a recipe to transformers' TrainingArguments."""

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
    """Return the arguments of a Trainer that keeps its checkpoints in `folder`: `training`, and what is fixed.

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
    """Make the schedule once, for an optimizer of nothing, so that its arguments are refused before a model loads."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=arguments.learning_rate)
    warmup = arguments.get_warmup_steps(arguments.max_steps)
    how: dict[str, Any] = {"num_warmup_steps": warmup, "num_training_steps": arguments.max_steps}
    given: Any = arguments.lr_scheduler_kwargs
    get_scheduler(arguments.lr_scheduler_type, optimizer, **how, scheduler_specific_kwargs=given)


def argument_values(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Return what TrainingArguments are made from: what differs from its defaults, so that no old name is touched."""
    fixed = {name: used for name, (used, _) in REFUSED.items() if used is not None and name in THEIRS}
    values = fixed | {
        name: value for name, value in non_default_settings(recipe.training).items() if value != THEIRS[name]
    }
    values |= {"output_dir": str(folder), "data_seed": recipe.data.seed, "use_cpu": on_cpu(recipe)}
    values["optim"] = recipe.training.optim or ("adamw_torch" if on_cpu(recipe) else "adamw_torch_fused")
    if recipe.training.deepspeed:
        values["deepspeed"] = completed(configuration(recipe.training.deepspeed))
    if on_cpu(recipe):
        values["dataloader_pin_memory"] = False  # there is nowhere to copy them to
    return _with_checkpointing(values, recipe)


def on_cpu(recipe: Recipe) -> bool:
    """Return whether `recipe` is computed on the CPU, by its wish or for want of anything else."""
    return recipe.training.use_cpu or not (torch.cuda.is_available() or torch.backends.mps.is_available())


def _with_checkpointing(values: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return `values` with the making again of activations under the name that this transformers has for it.

    Raises:
        ConfigError: this transformers cannot do what is asked for.
    """
    name = checkpointing_argument()
    for old in (_OLD_NAME, f"{_OLD_NAME}_kwargs"):
        if old in values:
            given = values.pop(old)
            values.setdefault(old.replace(_OLD_NAME, name), given)
    if not recipe.checkpoints_activations:
        return values
    options = {"use_reentrant": False} | dict(values.get(f"{name}_kwargs") or {})
    if "offload" in options and on_cpu(recipe):
        del options["offload"]  # they lie there anyway
    if "offload" in options and name == _OLD_NAME:
        raise ConfigError(
            f"training.{_OLD_NAME}_kwargs: offload needs a later transformers: update it, or leave it out."
        )
    return values | {f"{name}_kwargs": options}
