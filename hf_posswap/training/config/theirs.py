"""The keys of `training:` and `peft:`, which are fields of TrainingArguments and of a PEFT config.

They are read from the installed versions of transformers and PEFT.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import types
from collections.abc import Mapping
from enum import Enum
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from transformers import TrainingArguments

from hf_posswap.checkpoints.adapters import import_peft
from hf_posswap.errors import MissingDependencyError
from hf_posswap.training.config.typed import Problems, read

_OWN_EVALUATION = "held-out loss is measured on whole documents, one by one: `evaluation` sets how"
_LIGER = "Liger's rotary functions and losses would replace the swap's"
_FSDP = "the accelerate launch file sets how weights are sharded: posswap recipes accelerate/fsdp2"

REFUSED: dict[str, tuple[object, str]] = {
    "output_dir": (None, "the recipe's `out` says the folder"),
    "logging_dir": (None, "the recipe's `out` says the folder"),
    "num_train_epochs": (None, "training.max_steps sets the length: windows are cut for exactly that many steps"),
    "warmup_ratio": (None, "a training.warmup_steps below 1 is a share of the steps"),
    "train_sampling_strategy": ("sequential", "windows are read in their order, so that a stop changes nothing"),
    "dataloader_in_order": (True, "windows are read in their order, so that a stop changes nothing"),
    "ignore_data_skip": (False, "a resumed training would read its first windows again"),
    "data_seed": (None, "data.seed is the seed of the data"),
    "remove_unused_columns": (False, "windows have positions and masks as columns"),
    "average_tokens_across_devices": (True, "each token has the same weight on every process"),
    "logging_nan_inf_filter": (False, "a NaN loss must stay visible: it stops the training"),
    "auto_find_batch_size": (False, "the batch size changes the result; memory is checked before the first step"),
    "resume_from_checkpoint": (None, "the same command resumes from the newest complete checkpoint in `out`"),
    "save_only_model": (False, "a training could not resume from such a checkpoint"),
    "save_on_each_node": (False, "checkpoints are written and sealed once"),
    "load_best_model_at_end": (False, "the last model is kept, and its record counts all tokens"),
    "label_smoothing_factor": (0.0, "`objective` sets the loss, and none smooths labels"),
    "use_liger_kernel": (False, _LIGER),
    "liger_kernel_config": (None, _LIGER),
    "use_cache": (False, "a step reads whole windows without a cache"),
    "optim_target_modules": (None, "`trainable` and `peft` set what is trained"),
    "accelerator_config": (None, "it splits and mixes batches, but each process must read its windows in order"),
    "parallelism_config": (None, "the accelerate launch file sets how processes share a sequence"),
    "fsdp": (None, _FSDP),
    "fsdp_config": (None, _FSDP),
    "local_rank": (-1, "the launcher sets it"),
    "hub_strategy": ("end", "only a reloaded, verified and measured model is pushed"),
    "hub_always_push": (False, "only a reloaded, verified and measured model is pushed"),
    "hub_token": (None, "a recipe is saved and shown; use hf auth login, or HF_TOKEN"),
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
    "length_column_name": ("length", "windows are not grouped by length: `data` sets how they are cut"),
    "do_predict": (False, "a recipe trains and measures; posswap eval and compare predict"),
}
"""Fields that a recipe fixes at one value: that value, and why another is refused."""

OWN: dict[str, object] = {
    "max_steps": 1000,
    "optim": None,
    "logging_steps": 10,
    "logging_first_step": True,
    "report_to": ["tensorboard"],
    "save_steps": 100,
    "save_total_limit": 2,
    "hub_private_repo": True,
    "disable_tqdm": True,
    "log_level": "warning",
}
"""Defaults that differ from transformers'. optim: adamw_torch_fused on a GPU, adamw_torch elsewhere."""

_NO_EFFECT_ON_WEIGHTS = (
    "logging_", "log_", "save_", "eval_", "hub_", "trackio_", "push_to_hub", "report_to", "run_name", "project",
    "disable_tqdm", "dataloader_", "use_cpu", "gradient_checkpointing", "activation_checkpointing", "torch_compile",
    "ddp_", "deepspeed", "debug", "skip_memory", "torch_empty", "enable_jit", "include_num", "do_", "restore_callback",
    "tf32", "metric_for", "greater_is",
)  # fmt: skip
_EVALUATION_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
"""Schedules that follow evaluation results."""
_EVALUATION_FIELDS = ("eval_", "metric_for", "greater_is")
TYPE = "peft_type"
PROVED = (
    "LORA", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "HRA", "VERA", "RANDLORA", "FOURIERFT", "MISS",
)  # fmt: skip
"""Types tested to train, save with the swap's parameters and reload unchanged (tests/training/test_peft.py)."""
_BASE = "it changes the weights of the base, which an adapter does not carry"
_SET_HERE = "hf_posswap sets it"
_REFUSED_FIELDS = {
    "base_model_name_or_path": _SET_HERE, "revision": _SET_HERE, "auto_mapping": _SET_HERE, "peft_version": _SET_HERE,
    "inference_mode": "a frozen adapter cannot be trained",
    "layer_replication": "the swap supports only the layers that the model has",
    "megatron_config": "only transformers models train", "megatron_core": "only transformers models train",
    "alora_invocation_tokens": "windows are plain documents without invocation tokens",
    "arrow_config": "it routes between existing adapters",
    "use_qalora": "weights are not quantized here",
}  # fmt: skip
_REFUSED_STARTS = {
    "pissa": _BASE, "olora": _BASE, "corda": _BASE, "loftq": _BASE, "mica": _BASE, "lora_ga": _BASE,
    "eva": "it starts with passes over data that a recipe does not give",
}  # fmt: skip


def settings_like(name: str, cls: Any, defaults: dict[str, object]) -> type:
    """Return a frozen dataclass with the fields of `cls`, annotated with types that a YAML file can hold.

    Args:
        name: of the new class.
        cls: a dataclass.
        defaults: defaults that replace those of `cls`.

    Example:
        >>> Settings = settings_like("Settings", TrainingArguments, {"max_steps": 7})
        >>> Settings().max_steps, Settings(learning_rate=1e-3).learning_rate, Settings().lr_scheduler_type
        (7, 0.001, 'linear')
    """
    hints = get_type_hints(cls)
    fields = []
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        default = defaults[field.name] if field.name in defaults else default_of(field)
        annotation = _yaml_annotation(hints[field.name], field.metadata.get("choices"))
        if default is None:
            annotation = Any if annotation is Any else Union[annotation, None]  # noqa: UP007 - a Literal of a tuple has no |
        default_field = dataclasses.field(default_factory=partial(copy.copy, default))
        fields.append((field.name, annotation, default_field))
    return dataclasses.make_dataclass(name, fields, frozen=True, namespace={"__module__": __name__})


def default_of(field: dataclasses.Field[object]) -> object:
    """Return the default of a dataclass field, the value of an enum member; None if there is no default."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    default = None if field.default is dataclasses.MISSING else field.default
    return default.value if isinstance(default, Enum) else default


def _yaml_annotation(hint: object, choices: Any) -> object:
    """Return `hint` as a type that a file can hold: the values of an enum, and Any for an arbitrary class."""
    if choices:
        return Literal[tuple(choices)]
    if get_origin(hint) in (Union, types.UnionType):
        members = get_args(hint)
        enums = [member for member in members if isinstance(member, type) and issubclass(member, Enum)]
        annotations = [_yaml_annotation(member, None) for member in members if not (enums and member is str)]
        return Any if Any in annotations else Union[tuple(annotations)]  # noqa: UP007 - members are known only at run time
    if isinstance(hint, type) and issubclass(hint, Enum):
        return Literal[tuple(member.value for member in hint)]
    if get_origin(hint) is list:
        return list[_yaml_annotation(get_args(hint)[0], None)]  # type: ignore[misc]
    plain = get_origin(hint) is not None or hint in (str, int, float, bool, type(None), list, dict, set)
    return hint if plain else Any


if TYPE_CHECKING:
    TrainingSettings = TrainingArguments
else:
    _fixed = {name: used for name, (used, _) in REFUSED.items()}
    TrainingSettings = settings_like("TrainingSettings", TrainingArguments, OWN | _fixed)

THEIRS: dict[str, object] = {
    field.name: default_of(field) for field in dataclasses.fields(TrainingArguments) if field.init
}
"""The defaults of transformers' TrainingArguments."""


def non_default_settings(settings: TrainingSettings) -> dict[str, object]:
    """Return the settings that differ from what transformers does by default.

    Example:
        >>> non_default_settings(TrainingSettings(max_steps=5, optim="sgd"))["optim"]
        'sgd'
    """
    our_defaults = vars(TrainingSettings())
    return {
        name: value
        for name, value in vars(settings).items()
        if name not in REFUSED and not (value == our_defaults[name] and value in (THEIRS[name], None))
    }


def result_settings(settings: TrainingSettings) -> dict[str, object]:
    """Return the settings that affect the trained weights, and not how a run is logged, saved and executed.

    Example:
        >>> result_settings(TrainingSettings(max_steps=5, save_steps=7, weight_decay=0.1))
        {'max_steps': 5, 'weight_decay': 0.1}
    """
    follows_evaluation = settings.lr_scheduler_type in _EVALUATION_SCHEDULES
    return {
        name: value
        for name, value in non_default_settings(settings).items()
        if affects_weights(name, measured=follows_evaluation)
    }


def affects_weights(name: str, *, measured: bool = False) -> bool:
    """Return whether the field `name` affects the trained weights; `measured`: the schedule follows evaluations."""
    return not name.startswith(_NO_EFFECT_ON_WEIGHTS) or (measured and name.startswith(_EVALUATION_FIELDS))


_REFUSED_TYPES = {
    "ADALORA": "its ranks need an extra loss and schedule that objective does not add",
    **dict.fromkeys(
        (
            "PROMPT_TUNING",
            "MULTITASK_PROMPT_TUNING",
            "P_TUNING",
            "PREFIX_TUNING",
            "ADAPTION_PROMPT",
            "CPT",
            "CARTRIDGE",
        ),
        "virtual tokens shift the positions of all other tokens, and a swap is about positions",
    ),
}


def read_peft(values: Mapping[str, object] | None, problems: Problems) -> dict[str, object] | None:
    """Return the fields of a PEFT config in `values`, with `peft_type`; None if `values` is None.

    Args:
        values: the mapping under `peft`.
        problems: collects what is wrong.

    Example:
        >>> problems = Problems()
        >>> read_peft({"r": 4, "lora_alfa": 8}, problems), [str(problem) for problem in problems.entries]
        ({'peft_type': 'LORA', 'r': 4}, ["peft.lora_alfa: no such key. Did you mean 'lora_alpha'?"])
    """
    if values is None:
        return None
    try:
        configs = _peft_configs()
    except MissingDependencyError as error:
        problems.add("peft", str(error))
        return None
    peft_type = str(values.get(TYPE, "LORA")).upper()
    if peft_type not in PROVED or peft_type not in configs:
        near = difflib.get_close_matches(peft_type, PROVED, n=1)
        reason = "PEFT has it, but it is untested here" if peft_type in configs else "PEFT has no such type"
        hint = f"Did you mean {near[0]}?" if near else f"Use {', '.join(PROVED[:-1])} or {PROVED[-1]}."
        problems.add(f"peft.{TYPE}", f"{peft_type}: {_REFUSED_TYPES.get(peft_type, reason)}. {hint}")
        return None
    requested = {str(name): value for name, value in values.items() if name != TYPE}
    settings = read(_settings_class(peft_type), requested, problems, "peft")
    fields = {name: getattr(settings, name) for name in requested if hasattr(settings, name)}
    for name, value in fields.items():
        if name in _REFUSED_FIELDS and value:
            problems.add(f"peft.{name}", f"leave it out: {_REFUSED_FIELDS[name]}.")
    init_weights = fields.get("init_lora_weights")
    for name, why in _REFUSED_STARTS.items():
        if isinstance(init_weights, str) and init_weights.startswith(name):
            problems.add("peft.init_lora_weights", f"{init_weights} cannot be used: {why}.")
    return {TYPE: peft_type, **fields}


@cache
def _peft_configs() -> dict[str, object]:
    import_peft()
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    return {str(peft_type.value): config for peft_type, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}


@cache
def _settings_class(peft_type: str) -> Any:
    return settings_like(f"{peft_type.title()}Settings", _peft_configs()[peft_type], {})


def config_class(peft_type: str) -> Any:
    """Return PEFT's config class for the type `peft_type`."""
    return _peft_configs()[peft_type]
