"""The plan of a record, checked against the config that contains it: a record is untrusted.

For a native swap, config and weights alone define the computation. Its record is accepted only if it agrees with them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch

from hf_posswap.errors import CheckpointError, PosswapError, RecordError
from hf_posswap.families.rope_config import config_at, parameters_of
from hf_posswap.patching.edits.settings import EditConfig, changed_settings
from hf_posswap.patching.inspect.bounds import Bounds, within
from hf_posswap.patching.plan.adaptation import as_trained
from hf_posswap.patching.plan.plan_swap import plan_swap
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.record import SwapRecord, native_config, native_config_class
from hf_posswap.patching.sites.rotary.edits import RebuildRotary
from hf_posswap.patching.sites.rotary.modules import keeps, matches, rebuilt, turns_nothing
from hf_posswap.schemes.rope import RotaryScheme
from hf_posswap.utils.format import said_by

_SHOWN = 4


def recorded_plan(config: Any, model_class: Any, bounds: Bounds | None = None) -> tuple[Any, SwapPlan]:
    """Return the model before the swap that `config` records, on meta, and the plan of that swap.

    Args:
        config: of a swapped model, its record with it.
        model_class: of the model.
        bounds: size limits of the model, by its weights; None: the default limits.

    Raises:
        CheckpointError: the model exceeds `bounds`.
        RecordError: the recorded swap cannot be applied, has another route, or is for another model type.
    """
    record = SwapRecord.from_dict(config.posswap)
    try:
        with within(bounds or Bounds(), config), torch.device("meta"):
            skeleton = model_class(native_config(config))
        plan = plan_swap(skeleton, record.choice(), **record.arguments)
    except (RecordError, CheckpointError):
        raise
    except Exception as error:  # a model class may raise anything for the original values in a record
        raise RecordError(
            f"config.posswap records a swap that cannot be applied to {model_class.__name__}: {said_by(error)}"
        ) from error
    is_plugin = native_config_class(config) is not type(config)
    route = "plugin" if is_plugin else "native"
    if {record.route, plan.route} != {route}:
        raise RecordError(
            f"config.posswap records a {record.route} swap to {plan.named}, which would be {plan.route} here, in the "
            f"config.json of a {route} one: take config.json from the original checkpoint, or use the version of "
            "transformers that it was made with."
        )
    if record.base_type != config.model_type:
        raise RecordError(
            f"config.posswap records a swap of a model of type {record.base_type!r}, and config.json is of one of type "
            f"{config.model_type!r}: take config.json from the original checkpoint."
        )
    return skeleton, as_trained(plan, record, config)


def refuse_lie(plan: SwapPlan, problems: list[str]) -> None:
    """Refuse the record of `plan` if there are `problems`: contradictions with config and weights.

    Raises:
        RecordError: lists them.
    """
    if not problems:
        return
    more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    raise RecordError(
        f"config.posswap records a swap to {plan.named} for {plan.max_length} tokens, and the {plan.model} that it "
        f"comes with is another model: {'; '.join(problems[:_SHOWN])}{more}. Take config.json from the original "
        "checkpoint; or remove posswap from it: config and weights then define the model."
    )


def config_problems(model: Any, skeleton: Any, plan: SwapPlan) -> Iterator[str]:
    """Yield the differences between a stock model and the result of applying a native `plan` to its `skeleton`.

    Args:
        model: as transformers built it from the config with the record; its weights are ignored.
        skeleton: the model before the swap, on meta.
        plan: of the swap.
    """
    values = {edit.path: edit.value for edit in plan.edits if isinstance(edit, EditConfig)}
    for name in plan.record.original:
        actual, expected = config_at(model.config, name), values.get(name, config_at(skeleton.config, name))
        if not isinstance(expected, dict) and actual != expected:
            yield f"config.{name} is {actual!r} instead of {expected!r}"
    rotary = [edit for edit in plan.edits if isinstance(edit, RebuildRotary)]
    yield from dict.fromkeys(problem for edit in rotary for problem in _rotary_problems(model, skeleton, plan, edit))
    yield from _setting_problems(model, skeleton, values, tuple(edit.path for edit in rotary))


def _rotary_problems(model: Any, skeleton: Any, plan: SwapPlan, edit: Any) -> Iterator[str]:
    """Yield the differences in a rotary module; frequencies come from the config, whatever the module's dtype."""
    stack, scheme = plan.sites.stack(edit.stack), plan.schemes[edit.stack]
    config = config_at(model.config, edit.part)
    original, old = config_at(skeleton.config, edit.part), skeleton.get_submodule(edit.path)
    module = rebuilt(old, config)
    if isinstance(scheme, RotaryScheme):
        good = all(matches(module, scheme, stack.geometry, name) for name in stack.full_attention_types)
        good = good and keeps(module, old, original, stack.full_attention_types)
    else:
        good = turns_nothing(module)
    planned = edit.values["rope_parameters"]
    if not good or _contradict(config, planned, stack.rope_layer_types):
        yield f"config.rope_parameters has {_differing(config, planned, stack.rope_layer_types)}"


def _contradict(config: Any, planned: Any, sets: tuple[str, ...]) -> bool:
    """Return whether the rope parameters of a config contradict the planned ones, even if the angles agree.

    A key missing in one of them is no contradiction: releases of transformers differ in the defaults that they write.
    """
    pairs = (_actual_and_planned(config, planned, name) for name in sets)
    return any(
        not _is_close(actual[key], expected[key])
        for actual, expected in pairs
        for key in actual.keys() & expected.keys()
    )


def _is_close(actual: Any, expected: Any) -> bool:
    """Return whether two values are equal up to float rounding."""
    if isinstance(actual, list) and isinstance(expected, list):
        return len(actual) == len(expected) and all(map(_is_close, actual, expected))
    if isinstance(actual, float) or isinstance(expected, float):
        return isinstance(actual, int | float) and isinstance(expected, int | float) and math.isclose(
            actual, expected, rel_tol=1e-5
        )  # fmt: skip
    return bool(actual == expected)


def _actual_and_planned(config: Any, planned: Any, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rope parameters of one set in a config, and the planned ones."""
    return parameters_of(config, name), (planned.get(name) if name else planned) or {}


def _differing(config: Any, planned: Any, sets: tuple[str, ...]) -> str:
    """Describe where the rope parameters of a config differ from the planned ones."""
    differences = []
    for name in sets:
        actual, expected = _actual_and_planned(config, planned, name)
        wrong = sorted(key for key in actual.keys() | expected.keys() if actual.get(key) != expected.get(key))
        differences += [f"{key}={actual.get(key)!r} instead of {expected.get(key)!r}" for key in wrong]
    return ", ".join(differences[:_SHOWN]) or "other frequencies"


def _setting_problems(model: Any, skeleton: Any, values: dict[str, Any], rotary: tuple[str, ...]) -> Iterator[str]:
    """Yield plain attributes of `model` that differ from a stock model of the planned config."""
    planned = copy.deepcopy(skeleton.config)
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        setattr(config_at(planned, path), leaf, value)
    try:
        with torch.device("meta"):
            fresh = type(skeleton)(planned)
    except PosswapError:
        raise
    except Exception:  # arbitrary model code; the config values were compared above
        return
    for path, name, actual, expected in changed_settings(model, fresh, rotary):
        yield f"{path}.{name} is {actual!r} instead of {expected!r}".lstrip(".")
