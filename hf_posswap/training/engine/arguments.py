"""Builds transformers' TrainingArguments from a recipe.

Of a DeepSpeed configuration, the recipe fills in missing values, and contradictions are refused.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments, get_scheduler

from hf_posswap.compat.transformers_trainer import checkpointing_argument, use_one_gpu
from hf_posswap.errors import CheckpointError, ConfigError
from hf_posswap.training.config import Recipe
from hf_posswap.training.config.theirs import REFUSED, THEIRS, non_default_settings
from hf_posswap.utils.atomic_io import read_json
from hf_posswap.utils.user_paths import expand_home

SAME: dict[str, tuple[str, str]] = {
    "gradient_accumulation_steps": ("gradient_accumulation_steps", "{} batches a step"),
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", "batches of {} windows"),
    "gradient_clipping": ("max_grad_norm", "gradients clipped at {}"),
}
"""DeepSpeed's keys: the key of `training` with the same meaning, and its description."""
_PRECISIONS = ("bf16", "fp16")
_WHOLE = "stage3_gather_16bit_weights_on_model_save"
_REFUSED_KEYS = {
    "optimizer": "the rates of `trainable` and training.optim would be lost: leave it out, the recipe has one",
    "scheduler": "training.lr_scheduler_type would be lost: leave it out, the recipe has one",
    "tensor_parallel": "it splits the heads that a swap relies on: leave it out",
}
_OPTION_VALUES = ("0.25", "3", "true", "float16")
"""Values of every type that the options of optimizers have."""
_OLD_NAME = "gradient_checkpointing"


def configuration(given: str | dict[str, object]) -> dict[str, object]:
    """Return the configuration `given`, or the one in the file `given`.

    Raises:
        ConfigError: it is not a configuration.
    """
    try:
        config = given if isinstance(given, dict) else read_json(expand_home(given))
        if not isinstance(config, dict):
            raise ValueError(f"expected a JSON object, got {type(config).__name__}")
        stage_of(config)
    except (CheckpointError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"training.deepspeed: {error}") from error
    return config


def stage_of(config: dict[str, Any]) -> int:
    """Return the ZeRO stage of a configuration.

    Example:
        >>> stage_of({"zero_optimization": {"stage": 3}}), stage_of({})
        (3, 0)
    """
    return int(config.get("zero_optimization", {}).get("stage", 0))


def completed(config: dict[str, Any]) -> dict[str, object]:
    """Return `config` with missing values left to the recipe, and with weights gathered for saving.

    Otherwise DeepSpeed would not clip gradients, and could not save the weights of a ZeRO-3 training.

    Example:
        >>> completed({"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5})["gradient_clipping"]
        0.5
        >>> completed({"zero_optimization": {"stage": 2}})["gradient_clipping"]
        'auto'
    """
    complete = copy.deepcopy(config)
    for key in (*SAME, "train_batch_size"):
        complete.setdefault(key, "auto")
    if not any(precision in complete for precision in _PRECISIONS):
        complete |= {precision: {"enabled": "auto"} for precision in _PRECISIONS}
    if stage_of(complete) == 3 and complete["zero_optimization"].get(_WHOLE, "auto") == "auto":
        complete["zero_optimization"][_WHOLE] = True
    return complete


def decided_settings(config: dict[str, Any]) -> dict[str, object]:
    """Return the keys and values of `training` that a configuration sets.

    Example:
        >>> decided_settings({"gradient_clipping": 0.5, "train_batch_size": "auto", "bf16": {"enabled": True}})
        {'max_grad_norm': 0.5, 'bf16': True, 'fp16': False}
    """
    decided = {name: config[key] for key, (name, _) in SAME.items() if config.get(key, "auto") != "auto"}
    enabled = {precision: (config.get(precision) or {}).get("enabled", "auto") for precision in _PRECISIONS}
    if True in enabled.values():  # at most one can be enabled
        enabled = {precision: value is True for precision, value in enabled.items()}
    return decided | {precision: value for precision, value in enabled.items() if value != "auto"}


def problem_of(config: dict[str, Any], recipe: Recipe) -> str | None:
    """Return why `recipe` cannot be trained with this configuration, or None."""
    if stage_of(config) not in (1, 2, 3):
        return (
            f"the configuration of DeepSpeed has ZeRO stage {stage_of(config)}: set 1, 2 or 3, or leave DeepSpeed out."
        )
    for key, why in _REFUSED_KEYS.items():
        if config.get(key):
            return f"the configuration of DeepSpeed has {key!r}: {why}."
    if stage_of(config) == 3 and config["zero_optimization"].get(_WHOLE) is False:
        return (
            f"the configuration of DeepSpeed has {_WHOLE} (zero3_save_16bit_model in accelerate's file) off, so there "
            "would be nothing to save at the end: turn it on."
        )
    for name, value in decided_settings(config).items():
        if value != getattr(recipe.training, name):
            return (
                f"the configuration of DeepSpeed sets {name} to {value}, and training.{name} is "
                f"{getattr(recipe.training, name)}: leave it out there, or set the same value."
            )
    return None


def training_arguments(recipe: Recipe, folder: Path) -> TrainingArguments:
    """Return the arguments of a Trainer that saves checkpoints in `folder`: `training` and the fixed values.

    Args:
        recipe: without stages.
        folder: for checkpoints.

    Raises:
        ConfigError: transformers refuses the values, or cannot meet them on this machine.
    """
    values = argument_values(recipe, folder)
    try:
        # enable_jit_checkpoint is the engine's own (stop_at_sigterm): transformers saves in the middle of a step
        arguments = TrainingArguments(**{**values, "enable_jit_checkpoint": False})
        # A schedule for a dummy optimizer refuses bad arguments before a model loads.
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=arguments.learning_rate)
        warmup = arguments.get_warmup_steps(arguments.max_steps)
        steps: dict[str, Any] = {"num_warmup_steps": warmup, "num_training_steps": arguments.max_steps}
        scheduler_kwargs: Any = arguments.lr_scheduler_kwargs
        get_scheduler(arguments.lr_scheduler_type, optimizer, **steps, scheduler_specific_kwargs=scheduler_kwargs)
        begins_at_full_rate = optimizer.param_groups[0]["lr"] >= arguments.learning_rate
    except (ValueError, ImportError, TypeError, OSError, NotImplementedError) as error:
        raise ConfigError(f"training: {' '.join(str(error).split())}") from error
    if warmup and begins_at_full_rate:
        raise ConfigError(
            f"training.warmup_steps: {recipe.training.lr_scheduler_type} has no warm-up, and transformers drops its "
            f"{warmup} steps silently: set training.warmup_steps=0, or a schedule with one, as constant_with_warmup."
        )
    unread = _unread_options(arguments)
    if unread:
        raise ConfigError(
            f"training.optim_args: transformers passes no {' or '.join(unread)} to {values['optim']}, and drops "
            "it silently: leave it out, or choose another training.optim."
        )
    use_one_gpu(arguments)  # a process without a launcher may see several
    return arguments


def _unread_options(arguments: TrainingArguments) -> list[str]:
    """Return the names in `optim_args` that change nothing of the optimizer, whatever their value is."""
    pairs = [pair.partition("=") for pair in (arguments.optim_args or "").replace(" ", "").split(",") if pair]
    unread, trial = [], copy.copy(arguments)
    for name, _, given in pairs:
        outcomes: list[object] = []
        for value in (None, given, *_OPTION_VALUES):
            trial.optim_args = None if value is None else f"{name}={value}"
            try:
                outcomes.append(Trainer.get_optimizer_cls_and_kwargs(trial)[1])
            except Exception as error:  # noqa: BLE001 - it reads the value, or the optimizer is not installed
                outcomes.append(error)
        unread += [name] if all(outcome == outcomes[0] for outcome in outcomes) else []
    return unread


def argument_values(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Return the arguments of TrainingArguments that differ from its defaults, so that no deprecated name is passed."""
    fixed = {name: used for name, (used, _) in REFUSED.items() if used is not None and name in THEIRS}
    values = fixed | {
        name: value for name, value in non_default_settings(recipe.training).items() if value != THEIRS[name]
    }
    values |= {"output_dir": str(folder), "data_seed": recipe.data.seed, "use_cpu": on_cpu(recipe)}
    values["optim"] = recipe.training.optim or ("adamw_torch" if on_cpu(recipe) else "adamw_torch_fused")
    if values.get("metric_for_best_model") and recipe.training.greater_is_better is None:
        values["greater_is_better"] = False  # all are losses; transformers knows only those whose names end in "loss"
    if recipe.training.deepspeed:
        values["deepspeed"] = completed(configuration(recipe.training.deepspeed))
    if on_cpu(recipe):
        values["dataloader_pin_memory"] = False  # batches stay on the CPU
    return _with_checkpointing(values, recipe)


def on_cpu(recipe: Recipe) -> bool:
    """Return whether `recipe` runs on the CPU, by `use_cpu` or because there is no accelerator."""
    return recipe.training.use_cpu or not (torch.cuda.is_available() or torch.backends.mps.is_available())


def _with_checkpointing(values: dict[str, Any], recipe: Recipe) -> dict[str, object]:
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
