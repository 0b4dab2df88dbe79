"""What an untrusted config may ask for: a model within bounds, and a record whose swap agrees with that config.

A config.json is untrusted and may have any number in it. On the meta device tensors take no memory, but modules do; and
tensors missing in a checkpoint (masks, sinusoids, weights of missing layers) are allocated in real memory when a model
is loaded, before anything compares it with the files.

For a native swap, config and weights alone define the computation. Its record is accepted only if it agrees with them.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from hf_posswap.compat.transformers_loading import auto_mapping
from hf_posswap.compat.transformers_models import building_on_meta
from hf_posswap.errors import CheckpointError, PosswapError, RecordError
from hf_posswap.families.locating import locate
from hf_posswap.families.rope_config import config_at, parameters_of
from hf_posswap.patching.edits.settings import EditConfig, changed_settings
from hf_posswap.patching.plan.adaptation import as_trained
from hf_posswap.patching.plan.plan_swap import plan_swap
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.model_class import build_class, native_class
from hf_posswap.patching.record.record import LONGEST, SwapRecord, native_config, native_config_class
from hf_posswap.patching.sites.rotary.edits import RebuildRotary
from hf_posswap.patching.sites.rotary.modules import keeps, matches, rebuilt, turns_nothing
from hf_posswap.schemes.rope import RotaryScheme
from hf_posswap.utils.format import said_by
from hf_posswap.utils.threads import PROCESS
from hf_posswap.utils.weight_shapes import Shapes, folder_shapes, refuse_outside

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedConfig, PreTrainedModel

MOST_MODULES = 2**18
"""Limit for a model whose weights are unknown: more than the Switch Transformer with 2048 experts in each layer."""
MOST_BUFFER_BYTES = 2**33
"""Limit for masks and tables that a model computes: several times those of the families with a mask."""
_SHOWN = 4


@dataclass(frozen=True)
class Bounds:
    """Size limits of a model.

    Attributes:
        modules: most modules.
        numbers: most elements in all parameters; None: unknown.
        basis: what the limits are based on, for messages.
    """

    modules: int = MOST_MODULES
    numbers: int | None = None
    basis: str = "no model of transformers comes near that"


def bounds_by(shapes: Shapes | None, config: PreTrainedConfig) -> Bounds:
    """Return the limits of a model whose weights have these `shapes`, with room for new heads and modules.

    Args:
        shapes: of a checkpoint's weights, by name; None: unknown.
        config: of the model; tells whether weights are packed.
    """
    if shapes is None:
        return Bounds()
    elements = sum(map(math.prod, shapes.values()))
    packed = 32 if getattr(config, "quantization_config", None) else 4
    basis = f"its weights are {len(shapes)} tensors of {elements} numbers in all"
    return Bounds(min(MOST_MODULES, 4096 + 16 * len(shapes)), 2**24 + packed * elements, basis)


def bounds_in(source: str | Path, config: PreTrainedConfig) -> Bounds:
    """Return the limits of the model of `config` by the weights in the folder `source`; for a Hub id, the defaults.

    Raises:
        CheckpointError: an index refers to weights outside the folder.
    """
    refuse_outside(Path(source))
    try:
        return bounds_by(folder_shapes(Path(source)), config)
    except CheckpointError:  # reported when the weights are read
        return Bounds()


@dataclass(eq=False)
class _Count:
    """The size so far of a model that is being built, checked against `bounds`."""

    bounds: Bounds
    config: PreTrainedConfig
    modules: int = 0
    numbers: int = 0
    bytes: int = 0

    def add_module(self) -> None:
        self.modules += 1
        self._check(self.modules, self.bounds.modules, "modules")

    def add_parameter(self, parameter: nn.Parameter) -> None:
        self.numbers += parameter.numel()
        self._check(self.numbers, self.bounds.numbers, "numbers in its weights")

    def add_buffer(self, buffer: Tensor) -> None:
        self._check(max(buffer.shape, default=0), LONGEST, "entries in a table that it computes")
        self.bytes += buffer.nbytes
        self._check(self.bytes, MOST_BUFFER_BYTES, "bytes of masks and tables that it computes")

    def _check(self, count: int, most: int | None, unit: str) -> None:
        if most is not None and count > most:
            raise CheckpointError(
                f"this {type(self.config).__name__} asks for a model with more than {most} {unit}, and "
                f"{self.bounds.basis}: check the sizes in config.json."
            )


class _Counts(threading.local):
    """The models that this thread is building, the outermost first."""

    def __init__(self) -> None:
        self.running: list[_Count] = []

    def of_module(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        for count in self.running:
            count.add_module()

    def of_parameter(self, parent: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            for count in self.running:
                count.add_parameter(parameter)

    def of_buffer(self, parent: nn.Module, name: str, buffer: Tensor | None) -> None:
        if buffer is not None:
            for count in self.running:
                count.add_buffer(buffer)


_counts = _Counts()
_installing = threading.Lock()
_installed: list[object] = []
"""Hooks that are never removed: torch iterates over them in every thread that builds a model, and fails if one is
removed meanwhile."""


def _install_hooks() -> None:
    with _installing:
        if not _installed:
            _installed.append(register_module_module_registration_hook(_counts.of_module))
            _installed.append(register_module_parameter_registration_hook(_counts.of_parameter))
            _installed.append(register_module_buffer_registration_hook(_counts.of_buffer))


@contextmanager
def within(bounds: Bounds, config: PreTrainedConfig) -> Iterator[None]:
    """Allow this thread to build one model from `config` in the block, within `bounds`.

    Raises:
        CheckpointError: the model exceeds them; the message says how.
    """
    _install_hooks()
    _counts.running.append(_Count(bounds, config))
    try:
        yield
    finally:
        _counts.running.pop()


def refuse_endless(model_class: Any, config: PreTrainedConfig, bounds: Bounds, **options: object) -> None:
    """Refuse a `config` whose model, before any swap, exceeds `bounds`.

    Args:
        model_class: of transformers, swapped or not, or an Auto class.
        config: not changed.
        bounds: of the model.
        options: for `from_config` of an Auto class.

    Raises:
        CheckpointError: the model exceeds them; the message says how.
    """
    config_class = type(config)
    plain = native_config(config) if native_config_class(config) is not config_class else copy.deepcopy(config)
    with within(bounds, plain), building_on_meta():
        if auto_mapping(model_class) is None:
            build_class(native_class(model_class), plain)
        else:
            with PROCESS:  # transformers changes the default dtype of the process meanwhile
                model_class.from_config(plain, **options)


def recorded_plan(
    config: PreTrainedConfig, model_class: type[PreTrainedModel], bounds: Bounds | None = None
) -> tuple[PreTrainedModel, SwapPlan]:
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
        with within(bounds or Bounds(), config), building_on_meta():
            skeleton = model_class(native_config(config))
        plan = plan_swap(skeleton, record.choice([stack.name for stack in locate(skeleton).stacks]), **record.arguments)
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
        f"comes with is another model: {'; '.join(problems[:_SHOWN])}{more}. Set it back in config.json, or take "
        "that file from the original checkpoint; or remove posswap from it: config and weights then define the model."
    )


def config_problems(model: PreTrainedModel, skeleton: PreTrainedModel, plan: SwapPlan) -> Iterator[str]:
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


def _rotary_problems(
    model: PreTrainedModel, skeleton: PreTrainedModel, plan: SwapPlan, edit: RebuildRotary
) -> Iterator[str]:
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


def _contradict(config: PreTrainedConfig, planned: object, sets: tuple[str, ...]) -> bool:
    """Return whether the rope parameters of a config contradict the planned ones, even if the angles agree.

    A key that one of them lacks is not a contradiction: releases of transformers differ in the defaults they write.
    """
    pairs = (_actual_and_planned(config, planned, name) for name in sets)
    return any(
        not _is_close(actual[key], expected[key])
        for actual, expected in pairs
        for key in actual.keys() & expected.keys()
    )


def _is_close(actual: object, expected: object) -> bool:
    """Return whether two values are equal up to float rounding."""
    if isinstance(actual, list) and isinstance(expected, list):
        return len(actual) == len(expected) and all(map(_is_close, actual, expected))
    if isinstance(actual, float) or isinstance(expected, float):
        return isinstance(actual, int | float) and isinstance(expected, int | float) and math.isclose(
            actual, expected, rel_tol=1e-5
        )  # fmt: skip
    return bool(actual == expected)


def _actual_and_planned(
    config: PreTrainedConfig, planned: Any, name: str
) -> tuple[dict[str, object], dict[str, object]]:
    """Return the rope parameters of one set in a config, and the planned ones."""
    return parameters_of(config, name), (planned.get(name) if name else planned) or {}


def _differing(config: PreTrainedConfig, planned: object, sets: tuple[str, ...]) -> str:
    """Describe where the rope parameters of a config differ from the planned ones."""
    differences = []
    for name in sets:
        actual, expected = _actual_and_planned(config, planned, name)
        wrong = sorted(key for key in actual.keys() | expected.keys() if actual.get(key) != expected.get(key))
        differences += [f"{key}={actual.get(key)!r} instead of {expected.get(key)!r}" for key in wrong]
    return ", ".join(differences[:_SHOWN]) or "other frequencies"


def _setting_problems(
    model: PreTrainedModel, skeleton: PreTrainedModel, values: Mapping[str, object], rotary: tuple[str, ...]
) -> Iterator[str]:
    """Yield plain attributes of `model` that differ from a stock model of the planned config."""
    planned = copy.deepcopy(skeleton.config)
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        setattr(config_at(planned, path), leaf, value)
    try:
        with building_on_meta():
            fresh = type(skeleton)(planned)
    except PosswapError:
        raise
    except Exception:  # arbitrary model code; the config values were compared above
        return
    for path, name, actual, expected in changed_settings(model, fresh, rotary):
        yield f"{path}.{name} is {actual!r} instead of {expected!r}".lstrip(".")


@contextmanager
def building_from(config: PreTrainedConfig) -> Iterator[None]:
    """Build a model from `config` in the block; an invalid config raises a clear error.

    Raises:
        CheckpointError: names the config's class, its architectures, and the original error.
    """
    try:
        yield
    except PosswapError:
        raise
    except Exception as error:  # a model's own code may raise anything
        named = f" (architectures {config.architectures})" if config.architectures else ""
        message = said_by(error).rstrip(".")
        raise CheckpointError(
            f"no model can be built from this {type(config).__name__}{named}: {type(error).__name__}: {message}. "
            "Check config.json against that of the original model."
        ) from error


def architectures_of(config: PreTrainedConfig) -> list[str]:
    """Return the class names in `config.architectures`.

    Raises:
        CheckpointError: it is not a list of names.
    """
    names = config.architectures or []
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"architectures of this {type(config).__name__} must be a list of class names, got {names!r}: check "
            "config.json."
        )
    return list(names)
