"""A configuration of DeepSpeed beside a recipe: what it leaves out is the recipe's, and it may not say otherwise."""

from __future__ import annotations

import copy
from typing import Any

from hf_posswap.errors import CheckpointError, ConfigError
from hf_posswap.training.config import Recipe
from hf_posswap.utils.atomic_io import read_json
from hf_posswap.utils.user_paths import expand_home

SAME: dict[str, tuple[str, str]] = {
    "gradient_accumulation_steps": ("gradient_accumulation_steps", "{} batches a step"),
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", "batches of {} windows"),
    "gradient_clipping": ("max_grad_norm", "gradients clipped at {}"),
}
"""Its keys: the key of `training` that says the same, and how it is said in words."""
_PRECISIONS = ("bf16", "fp16")
_WHOLE = "stage3_gather_16bit_weights_on_model_save"
_LOST = {
    "optimizer": "the rates of `trainable` and training.optim would be lost: leave it out, the recipe has one",
    "scheduler": "training.lr_scheduler_type would be lost: leave it out, the recipe has one",
    "tensor_parallel": "it cuts the heads that a swap counts on: leave it out",
}


def configuration(given: str | dict[str, Any]) -> dict[str, Any]:
    """Return the configuration `given`: itself, or what its file holds.

    Raises:
        ConfigError: it is none.
    """
    try:
        held = given if isinstance(given, dict) else read_json(expand_home(given))
        if not isinstance(held, dict):
            raise ValueError(f"expected a JSON object, got {type(held).__name__}")
        stage_of(held)
    except (CheckpointError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"training.deepspeed: {error}") from error
    return held


def stage_of(held: dict[str, Any]) -> int:
    """Return the ZeRO stage of a configuration.

    Example:
        >>> stage_of({"zero_optimization": {"stage": 3}}), stage_of({})
        (3, 0)
    """
    return int(held.get("zero_optimization", {}).get("stage", 0))


def completed(held: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration that takes from the recipe what `held` leaves out, and that gathers weights to be saved.

    Without it DeepSpeed would clip no gradient, and end a training under ZeRO-3 with nothing to save.

    Example:
        >>> completed({"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5})["gradient_clipping"]
        0.5
        >>> completed({"zero_optimization": {"stage": 2}})["gradient_clipping"]
        'auto'
    """
    whole = copy.deepcopy(held)
    for key in (*SAME, "train_batch_size"):
        whole.setdefault(key, "auto")
    if not any(precision in whole for precision in _PRECISIONS):
        whole |= {precision: {"enabled": "auto"} for precision in _PRECISIONS}
    if stage_of(whole) == 3 and whole["zero_optimization"].get(_WHOLE, "auto") == "auto":
        whole["zero_optimization"][_WHOLE] = True
    return whole


def said_by(held: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of `training` that a configuration decides, with its values.

    Example:
        >>> said_by({"gradient_clipping": 0.5, "train_batch_size": "auto", "bf16": {"enabled": True}})
        {'max_grad_norm': 0.5, 'bf16': True, 'fp16': False}
    """
    found = {name: held[key] for key, (name, _) in SAME.items() if held.get(key, "auto") != "auto"}
    enabled = {precision: (held.get(precision) or {}).get("enabled", "auto") for precision in _PRECISIONS}
    if True in enabled.values():  # one alone can be
        enabled = {precision: value is True for precision, value in enabled.items()}
    return found | {precision: value for precision, value in enabled.items() if value != "auto"}


def problem_of(held: dict[str, Any], recipe: Recipe) -> str | None:
    """Return what a configuration says that `recipe` cannot be trained as; None: nothing."""
    if stage_of(held) not in (1, 2, 3):
        return f"the configuration of DeepSpeed has ZeRO stage {stage_of(held)}: say 1, 2 or 3, or leave DeepSpeed out."
    for key, why in _LOST.items():
        if held.get(key):
            return f"the configuration of DeepSpeed has {key!r}: {why}."
    if stage_of(held) == 3 and held["zero_optimization"].get(_WHOLE) is False:
        return (
            f"the configuration of DeepSpeed has {_WHOLE} (zero3_save_16bit_model in accelerate's file) off, so there "
            "would be nothing to save at the end: turn it on."
        )
    for name, value in said_by(held).items():
        if value != getattr(recipe.training, name):
            return (
                f"the configuration of DeepSpeed says {name} {value}, and training.{name} is "
                f"{getattr(recipe.training, name)}: leave it out there, or say the same."
            )
    return None
