"""The plan that a record makes, held against the config that it came with: a record may say anything.

What a natively expressed swap computes is in config and weights alone. Its record is believed where it says the same.
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
from hf_posswap.patching.sites.rotary.matching import keeps, matches, turns_nothing
from hf_posswap.patching.sites.rotary.modules import rebuilt
from hf_posswap.schemes.rope import RotaryScheme
from hf_posswap.utils.format import said_by

_SHOWN = 4


def recorded_plan(config: Any, model_class: Any, bounds: Bounds | None = None) -> tuple[Any, SwapPlan]:
    """Return the model before the swap that `config` records, on meta, and the plan of that swap.

    Args:
        config: of a swapped model, its record with it.
        model_class: of the model.
        bounds: of what it may be, by its weights; None: those of any model.

    Raises:
        CheckpointError: the model does not stay within `bounds`.
        RecordError: the record cannot be carried out, or not by the route that it names, or on another kind of model.
    """
    record = SwapRecord.from_dict(config.posswap)
    try:
        with within(bounds or Bounds(), config), torch.device("meta"):
            skeleton = model_class(native_config(config))
        plan = plan_swap(skeleton, record.choice(), **record.arguments)
    except (RecordError, CheckpointError):
        raise
    except Exception as error:  # a class of transformers may raise anything at the values that a record calls original
        raise RecordError(
            f"config.posswap records a swap that cannot be carried out on {model_class.__name__}: {said_by(error)}"
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
    """Refuse the record that made `plan` where there are `problems`: what config and weights say otherwise.

    Raises:
        RecordError: names them.
    """
    if not problems:
        return
    more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    raise RecordError(
        f"config.posswap records a swap to {plan.named} for {plan.max_length} tokens, and the {plan.model} that it "
        f"comes with is another model: {'; '.join(problems[:_SHOWN])}{more}. Take config.json from the original "
        "checkpoint; or take posswap out of it: the model is then what config and weights say."
    )


def config_problems(model: Any, skeleton: Any, plan: SwapPlan) -> Iterator[str]:
    """Give what differs between a stock model and what a native `plan` makes of the `skeleton` that it was made for.

    Args:
        model: as transformers built it from the config that the record is in; its weights are not looked at.
        skeleton: the model before the swap, on meta.
        plan: of the swap.
    """
    values = {edit.path: edit.value for edit in plan.edits if isinstance(edit, EditConfig)}
    for name in plan.record.original:
        held, expected = config_at(model.config, name), values.get(name, config_at(skeleton.config, name))
        if not isinstance(expected, dict) and held != expected:
            yield f"config.{name} is {held!r} instead of {expected!r}"
    rotary = [edit for edit in plan.edits if isinstance(edit, RebuildRotary)]
    yield from dict.fromkeys(problem for edit in rotary for problem in _rotary_problems(model, skeleton, plan, edit))
    yield from _setting_problems(model, skeleton, values, tuple(edit.path for edit in rotary))


def _rotary_problems(model: Any, skeleton: Any, plan: SwapPlan, edit: Any) -> Iterator[str]:
    """Give what differs in a rotary module; frequencies are those of the config, whatever the module was cast to."""
    stack, scheme = plan.sites.stack(edit.stack), plan.schemes[edit.stack]
    part = config_at(model.config, edit.part)
    own, old = config_at(skeleton.config, edit.part), skeleton.get_submodule(edit.path)
    module = rebuilt(old, part)
    if isinstance(scheme, RotaryScheme):
        good = all(matches(module, scheme, stack.geometry, name) for name in stack.full_attention_types)
        good = good and keeps(module, old, own, stack.full_attention_types)
    else:
        good = turns_nothing(module)
    planned = edit.values["rope_parameters"]
    if not good or _contradict(part, planned, stack.rope_layer_types):
        yield f"config.rope_parameters say {_differing(part, planned, stack.rope_layer_types)}"


def _contradict(part: Any, planned: Any, sets: tuple[str, ...]) -> bool:
    """Return whether the rope parameters of a config say otherwise than planned, though they may turn alike.

    What one of them leaves to its default is no contradiction: releases of transformers differ in what they write.
    """
    pairs = (_held_and_planned(part, planned, name) for name in sets)
    return any(
        not _alike(held[key], expected[key]) for held, expected in pairs for key in held.keys() & expected.keys()
    )


def _alike(held: Any, expected: Any) -> bool:
    """Return whether two values are the same but for the rounding of a float."""
    if isinstance(held, list) and isinstance(expected, list):
        return len(held) == len(expected) and all(map(_alike, held, expected))
    if isinstance(held, float) or isinstance(expected, float):
        return isinstance(held, int | float) and isinstance(expected, int | float) and math.isclose(
            held, expected, rel_tol=1e-5
        )  # fmt: skip
    return bool(held == expected)


def _held_and_planned(part: Any, planned: Any, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rope parameters of one set that a config holds, and the planned ones."""
    return parameters_of(part, name), (planned.get(name) if name else planned) or {}


def _differing(part: Any, planned: Any, sets: tuple[str, ...]) -> str:
    """Return in words where the rope parameters of a config are not the planned ones."""
    said = []
    for name in sets:
        held, expected = _held_and_planned(part, planned, name)
        wrong = sorted(key for key in held.keys() | expected.keys() if held.get(key) != expected.get(key))
        said += [f"{key}={held.get(key)!r} instead of {expected.get(key)!r}" for key in wrong]
    return ", ".join(said[:_SHOWN]) or "other frequencies"


def _setting_problems(model: Any, skeleton: Any, values: dict[str, Any], rotary: tuple[str, ...]) -> Iterator[str]:
    """Give where plain attributes of `model` are not those of a stock model of the planned config."""
    planned = copy.deepcopy(skeleton.config)
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        setattr(config_at(planned, path), leaf, value)
    try:
        with torch.device("meta"):
            fresh = type(skeleton)(planned)
    except PosswapError:
        raise
    except Exception:  # code of any model: a plan that it does not build was compared by its config values
        return
    for path, name, held, expected in changed_settings(model, fresh, rotary):
        yield f"{path}.{name} is {held!r} instead of {expected!r}".lstrip(".")
