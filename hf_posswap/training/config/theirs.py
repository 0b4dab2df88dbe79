"""The keys of `training:`, which are the fields of transformers' TrainingArguments, read from the installed version."""

from __future__ import annotations

import copy
import dataclasses
import types
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from transformers import TrainingArguments

_OWN_EVALUATION = "held-out loss is measured on whole documents, one after another: `evaluation` says how"
_LIGER = "Liger's rotary functions and losses would take the place of the swap's"
_FSDP = "the file of accelerate launch says how weights are sharded: posswap recipes accelerate/fsdp2"

REFUSED: dict[str, tuple[Any, str]] = {
    "output_dir": (None, "the recipe's `out` says the folder"),
    "logging_dir": (None, "the recipe's `out` says the folder"),
    "num_train_epochs": (None, "a training is as long as training.max_steps: windows are cut for exactly these"),
    "warmup_ratio": (None, "training.warmup_steps below 1 is such a share of the steps"),
    "train_sampling_strategy": ("sequential", "windows are read in their order, so that a stop changes nothing"),
    "dataloader_in_order": (True, "windows are read in their order, so that a stop changes nothing"),
    "ignore_data_skip": (False, "a training that goes on would read its first windows again"),
    "data_seed": (None, "data.seed is the seed of the data"),
    "remove_unused_columns": (False, "positions and masks are columns of a window"),
    "average_tokens_across_devices": (True, "each token counts alike, whichever process reads it"),
    "logging_nan_inf_filter": (False, "nothing may hide a loss that is no number: the training stops there"),
    "auto_find_batch_size": (False, "another batch is another training; memory is checked before the first step"),
    "resume_from_checkpoint": (None, "the same command goes on by itself, from the newest whole checkpoint in `out`"),
    "save_only_model": (False, "a training could not go on from such a checkpoint"),
    "save_on_each_node": (False, "checkpoints are written and sealed once"),
    "load_best_model_at_end": (False, "what is kept, and what its record tells the tokens of, is the last model"),
    "label_smoothing_factor": (0.0, "`objective` says what is minimised, and none of them smooths"),
    "use_liger_kernel": (False, _LIGER),
    "liger_kernel_config": (None, _LIGER),
    "use_cache": (False, "a step reads whole windows: no keys are cached"),
    "optim_target_modules": (None, "`trainable` and `peft` say what is trained"),
    "accelerator_config": (None, "it splits and mixes batches, and each process reads windows of its own, in order"),
    "parallelism_config": (None, "the file of accelerate launch says how processes share a sequence"),
    "fsdp": (None, _FSDP),
    "fsdp_config": (None, _FSDP),
    "local_rank": (-1, "the launcher says it"),
    "hub_strategy": ("end", "only a model that was loaded again, verified and measured is pushed"),
    "hub_always_push": (False, "only a model that was loaded again, verified and measured is pushed"),
    "hub_token": (None, "a recipe is kept and shown; use hf auth login, or HF_TOKEN"),
    "per_device_eval_batch_size": (8, _OWN_EVALUATION),
    "prediction_loss_only": (False, _OWN_EVALUATION),
    "eval_do_concat_batches": (True, _OWN_EVALUATION),
    "eval_use_gather_object": (False, _OWN_EVALUATION),
    "eval_accumulation_steps": (None, _OWN_EVALUATION),
    "include_for_metrics": ([], _OWN_EVALUATION),
    "batch_eval_metrics": (False, _OWN_EVALUATION),
    "bf16_full_eval": (False, _OWN_EVALUATION),
    "fp16_full_eval": (False, _OWN_EVALUATION),
    "label_names": (None, _OWN_EVALUATION),
    "length_column_name": ("length", "windows are not grouped by length: `data` says how they are cut"),
    "do_predict": (False, "a recipe trains and measures; posswap eval and compare predict"),
}
"""Fields that our guarantees need at one value: that value, and why another is refused."""

OWN: dict[str, Any] = {
    "max_steps": 1000,
    "optim": None,
    "logging_steps": 10,
    "report_to": ["tensorboard"],
    "save_steps": 100,
    "save_total_limit": 2,
    "hub_private_repo": True,
    "disable_tqdm": True,
    "log_level": "warning",
}
"""Defaults that differ from transformers'. optim: adamw_torch_fused on a GPU, adamw_torch elsewhere."""

_NO_PART = (
    "logging_", "log_", "save_", "eval_", "hub_", "trackio_", "push_to_hub", "report_to", "run_name", "project",
    "disable_tqdm", "dataloader_", "use_cpu", "gradient_checkpointing", "activation_checkpointing", "torch_compile",
    "ddp_", "deepspeed", "debug", "skip_memory", "torch_empty", "enable_jit", "include_num", "do_", "restore_callback",
    "tf32", "metric_for", "greater_is",
)  # fmt: skip
_BY_EVALUATION = ("reduce_lr_on_plateau", "greedy")
"""Schedules that go by what is measured."""
_OF_EVALUATION = ("eval_", "metric_for", "greater_is")


def settings_like(name: str, cls: Any, own: dict[str, Any]) -> Any:
    """Return a frozen dataclass with the fields of `cls`, whose types are those that a YAML file can give.

    Args:
        name: of the new class.
        cls: a dataclass.
        own: defaults that take the place of its own.

    Example:
        >>> made = settings_like("Mine", TrainingArguments, {"max_steps": 7})
        >>> made().max_steps, made(learning_rate=1e-3).learning_rate, made().lr_scheduler_type
        (7, 0.001, 'linear')
    """
    hints = get_type_hints(cls)
    made = []
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        default = own[field.name] if field.name in own else default_of(field)
        kind = _kind(hints[field.name], field.metadata.get("choices"))
        if default is None:
            kind = Any if kind is Any else Union[kind, None]  # noqa: UP007 - a Literal of a tuple has no |
        held: Any = dataclasses.field(default_factory=partial(copy.copy, default))
        made.append((field.name, kind, held))
    return dataclasses.make_dataclass(name, made, frozen=True, namespace={"__module__": __name__})


def default_of(field: Any) -> Any:
    """Return the default of a dataclass's field, of an enum its value; None where it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    default = None if field.default is dataclasses.MISSING else field.default
    return default.value if isinstance(default, Enum) else default


def _kind(hint: Any, choices: Any) -> Any:
    """Return `hint` as what a file can say: of an enumeration its values, and of a class without fields anything."""
    if choices:
        return Literal[tuple(choices)]
    if get_origin(hint) in (Union, types.UnionType):
        members = get_args(hint)
        named = [member for member in members if isinstance(member, type) and issubclass(member, Enum)]
        kinds = [_kind(member, None) for member in members if not (named and member is str)]
        return Any if Any in kinds else Union[tuple(kinds)]  # noqa: UP007 - of members that are known here alone
    if isinstance(hint, type) and issubclass(hint, Enum):
        return Literal[tuple(member.value for member in hint)]
    if get_origin(hint) is list:
        return list[_kind(get_args(hint)[0], None)]  # type: ignore[misc]
    plain = get_origin(hint) is not None or hint in (str, int, float, bool, type(None), list, dict, set)
    return hint if plain else Any


if TYPE_CHECKING:
    TrainingSettings = TrainingArguments
else:
    _fixed = {name: used for name, (used, _) in REFUSED.items()}
    TrainingSettings = settings_like("TrainingSettings", TrainingArguments, OWN | _fixed)

THEIRS: dict[str, Any] = {
    field.name: default_of(field) for field in dataclasses.fields(TrainingArguments) if field.init
}
"""The defaults of transformers."""


def said(settings: TrainingSettings) -> dict[str, Any]:
    """Return what `settings` say beyond what transformers would do by itself.

    Example:
        >>> said(TrainingSettings(max_steps=5, optim="sgd"))["optim"]
        'sgd'
    """
    ours = vars(TrainingSettings())
    return {
        name: value
        for name, value in vars(settings).items()
        if name not in REFUSED and not (value == ours[name] and value in (THEIRS[name], None))
    }


def with_a_part(settings: TrainingSettings) -> dict[str, Any]:
    """Return what of `settings` has a part in the weights that come out: not how they are watched, kept and computed.

    Example:
        >>> with_a_part(TrainingSettings(max_steps=5, save_steps=7, weight_decay=0.1))
        {'max_steps': 5, 'weight_decay': 0.1}
    """
    measured = settings.lr_scheduler_type in _BY_EVALUATION
    return {name: value for name, value in said(settings).items() if has_a_part(name, measured=measured)}


def has_a_part(name: str, *, measured: bool = False) -> bool:
    """Return whether the field `name` has a part in the weights; `measured`: the schedule goes by evaluations."""
    return not name.startswith(_NO_PART) or (measured and name.startswith(_OF_EVALUATION))
