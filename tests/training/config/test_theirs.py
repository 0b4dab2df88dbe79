"""`training:` is TrainingArguments: whatever a recipe says arrives in the Trainer, or is refused with a reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import transformers
from transformers import TrainingArguments

from hf_posswap.errors import ConfigError
from hf_posswap.training.config import Recipe, make_recipe
from hf_posswap.training.config.load import to_dict
from hf_posswap.training.config.theirs import REFUSED, THEIRS, TrainingSettings, result_settings
from hf_posswap.training.config.typed import OLD
from hf_posswap.training.engine.arguments import argument_values, training_arguments

HINTS: dict[str, Any] = get_type_hints(TrainingSettings)
FIELDS = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
ANOTHER: dict[str, Any] = {
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "optim_args": "momentum=0.9",
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
    "activation_checkpointing_kwargs": {"use_reentrant": True},
    "deepspeed": {"zero_optimization": {"stage": 2}},
    "report_to": ["tensorboard", "tensorboard"],
    "debug": ["underflow_overflow"],
    "include_for_metrics": ["loss"],
    "include_num_input_tokens_seen": "all",
    "label_names": ["labels"],
    "metric_for_best_model": "eval_loss",
    "adam_beta1": 0.5,
    "adam_beta2": 0.5,
    "hub_model_id": "me/mine",
    "lr_scheduler_type": "polynomial",
}
"""Values that a rule by the type would not find, or would be refused together with the other defaults."""
BESIDE: dict[str, dict[str, Any]] = {
    "push_to_hub": {"hub_model_id": "me/mine"},
    "gradient_checkpointing_kwargs": {"gradient_checkpointing": True},
    "activation_checkpointing_kwargs": {"activation_checkpointing": True},
    "dataloader_prefetch_factor": {"dataloader_num_workers": 1},
    "lr_scheduler_kwargs": {"lr_scheduler_type": "cosine_with_restarts"},
    "save_strategy": {"metric_for_best_model": "loss"},
    "optim_args": {"optim": "sgd"},
}
ELSEWHERE = ("deepspeed", "tf32", "bf16", "fp16", "use_cpu", "ddp_backend", "dataloader_pin_memory",
             "enable_jit_checkpoint")  # fmt: skip
"""Fields that this machine may not run, or that the engine does itself: the values before TrainingArguments."""


def another(name: str) -> Any:
    """Return a value for the field `name` that is not its default."""
    if name in ANOTHER:
        return ANOTHER[name]
    default = getattr(TrainingSettings(), name)
    kinds = [HINTS[name], *get_args(HINTS[name])]
    for kind in kinds:
        if kind is bool:
            return not default
        if kind in (int, float):
            return 2 if default != 2 else 3
        if kind is str and not any(member is bool for member in kinds):
            return "something"
        if kind is dict or get_origin(kind) is dict:
            return {"a": 1}
    (choices,) = [get_args(kind) or (kind,) for kind in kinds if "Literal" in str(kind)][:1] or [("something",)]
    flat = [member for choice in choices for member in (get_args(choice) or (choice,))]
    return next(choice for choice in flat if choice not in (default, type(None), None))


def recipe(values: dict[str, Any]) -> Recipe:
    return make_recipe({"model": {"name": "any"}, "swap": {"scheme": "rope"}, "training": values})


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_arrives_or_is_refused_with_a_reason(tmp_path: Path, name: str) -> None:
    value = another(name)
    assert value != getattr(TrainingSettings(), name)
    if name in REFUSED:
        used, why = REFUSED[name]
        with pytest.raises(ConfigError, match=rf"training\.{name}: ") as caught:
            recipe({name: value})
        assert why in str(caught.value)
        assert getattr(recipe({name: used}).training, name) == used
        return
    wanted = recipe({name: value, **BESIDE.get(name, {})})
    assert getattr(make_recipe(to_dict(wanted)).training, name) == value
    elsewhere = name in ELSEWHERE
    found = (
        argument_values(wanted, tmp_path)[name] if elsewhere else getattr(training_arguments(wanted, tmp_path), name)
    )
    if isinstance(value, dict):
        assert value.items() <= found.items()
    else:
        assert found == value


def test_what_nobody_sets_is_transformers_own(tmp_path: Path) -> None:
    before = transformers.logging.get_verbosity()  # by which TrainingArguments chooses its progress bars
    transformers.logging.set_verbosity_warning()
    plain = vars(TrainingArguments(output_dir=str(tmp_path), use_cpu=True, data_seed=0, report_to="none"))
    ours = vars(training_arguments(recipe({"report_to": "none"}), tmp_path))
    transformers.logging.set_verbosity(before)
    differing = {name for name in FIELDS if ours[name] != plain[name]}
    assert differing == {
        "max_steps", "optim", "logging_steps", "save_steps", "save_total_limit", "hub_private_repo", "disable_tqdm",
        "log_level", "logging_first_step", "remove_unused_columns", "train_sampling_strategy", "logging_nan_inf_filter",
        "hub_strategy",
    }  # fmt: skip


def test_every_refusal_is_of_a_field_that_a_transformers_has() -> None:
    older = {"logging_dir", "warmup_ratio"}
    assert set(REFUSED) - set(FIELDS) <= older | {
        "activation_checkpointing",
        "liger_kernel_config",
        "dataloader_in_order",
    }
    assert set(THEIRS) == set(FIELDS)


@pytest.mark.parametrize("old", [key for key in OLD if "[]" not in key])
def test_an_old_key_names_the_new_one(old: str) -> None:
    section, _, name = old.partition(".")
    with pytest.raises(ConfigError, match=rf"\(1\) {old}: no such key; .* {OLD[old][0]}\.$"):
        make_recipe({"model": {"name": "any"}, "swap": {"scheme": "rope"}, section: {name: 1}})


def test_old_keys_of_stages_and_unknown_ones_of_old_sections_are_told() -> None:
    values = {"model": {"name": "any"}, "swap": {"scheme": "rope"}, "stages": [{}, {"steps": 3}], "watch": {"all": 1}}
    with pytest.raises(ConfigError) as caught:
        make_recipe(values)
    assert "stages[1].steps: no such key; TrainingArguments calls it stages[1].max_steps." in str(caught.value)
    assert "watch.all: no such key; watch is training now." in str(caught.value)


def test_new_keys_of_old_ones_are_keys() -> None:
    for new, _ in OLD.values():
        section, _, name = new.partition(".")
        assert section != "training" or name in HINTS, new


def test_what_is_watched_kept_and_computed_has_no_part_in_the_weights() -> None:
    same = {"save_steps": 7, "logging_steps": 3, "report_to": "none", "eval_strategy": "steps", "run_name": "a"}
    computed = {"use_cpu": True, "torch_compile": True, "dataloader_num_workers": 2, "gradient_checkpointing": True}
    plain = result_settings(TrainingSettings())
    assert result_settings(recipe(same | computed).training) == plain == {"max_steps": 1000}
    assert result_settings(recipe({"optim": "sgd", "seed": 3}).training) == {
        "max_steps": 1000,
        "optim": "sgd",
        "seed": 3,
    }
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 5}
    assert result_settings(recipe(plateau).training) == {"max_steps": 1000, **plateau}
