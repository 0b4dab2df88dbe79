"""Size limits for a config: its model is first built on the meta device, and refused if it is too large.

A config.json is untrusted and may have any number in it. On the meta device tensors take no memory, but modules do; and
tensors missing in a checkpoint (masks, sinusoids, weights of missing layers) are allocated in real memory when a model
is loaded, before anything compares it with the files.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from hf_posswap.compat.transformers_auto import auto_mapping
from hf_posswap.compat.transformers_models import without_initialising
from hf_posswap.errors import CheckpointError
from hf_posswap.patching.record.model_class import build_class, native_class
from hf_posswap.patching.record.record import LONGEST, native_config, native_config_class
from hf_posswap.utils.threads import PROCESS
from hf_posswap.utils.weight_shapes import Shapes, folder_shapes, refuse_outside

MOST_MODULES = 2**18
"""Limit for a model whose weights are unknown: more than the Switch Transformer with 2048 experts in each layer."""
MOST_BUFFER_BYTES = 2**33
"""Limit for masks and tables that a model computes: several times those of the families with a mask."""


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


def bounds_by(shapes: Shapes | None, config: Any) -> Bounds:
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


def bounds_in(source: str | Path, config: Any) -> Bounds:
    """Return the limits of the model of `config` by the weights in the folder `source`; for a Hub id, the defaults.

    Raises:
        CheckpointError: an index refers to weights outside the folder.
    """
    refuse_outside(Path(source))
    try:
        return bounds_by(folder_shapes(Path(source)), config)
    except CheckpointError:  # reported when the weights are read
        return Bounds()


class _Count:
    """The size so far of a model that is being built, checked against `bounds`."""

    def __init__(self, bounds: Bounds, config: Any) -> None:
        self.bounds, self.config = bounds, config
        self.modules = self.numbers = self.bytes = 0

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
_installed: list[Any] = []
"""Hooks that are never removed: torch iterates over them in every thread that builds a model, and fails if one is
removed meanwhile."""


def _install_hooks() -> None:
    with _installing:
        if not _installed:
            _installed.append(register_module_module_registration_hook(_counts.of_module))
            _installed.append(register_module_parameter_registration_hook(_counts.of_parameter))
            _installed.append(register_module_buffer_registration_hook(_counts.of_buffer))


@contextmanager
def within(bounds: Bounds, config: Any) -> Iterator[None]:
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


def refuse_endless(model_class: Any, config: Any, bounds: Bounds, **options: Any) -> None:
    """Refuse a `config` whose model, before any swap, exceeds `bounds`.

    Args:
        model_class: of transformers, swapped or not, or an Auto class.
        config: not changed.
        bounds: of the model.
        options: for `from_config` of an Auto class.

    Raises:
        CheckpointError: the model exceeds them; the message says how.
    """
    config_class: Any = type(config)
    plain = native_config(config) if native_config_class(config) is not config_class else copy.deepcopy(config)
    with within(bounds, plain), without_initialising(), torch.device("meta"):
        if auto_mapping(model_class) is None:
            build_class(native_class(model_class), plain)
        else:
            with PROCESS:  # transformers changes the default dtype of the process meanwhile
                model_class.from_config(plain, **options)
