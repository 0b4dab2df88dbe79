"""What PEFT calls the modules that it wraps, and the copies that it trains."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

_WRAPPED = re.compile(r"\.(modules_to_save\.[^.]+|original_module|base_layer)\.")


def is_adapted(module: nn.Module) -> bool:
    """Return whether `module` is one of PEFT's around a module of the model.

    Touches `base_layer` of tuner layers and `original_module` of `ModulesToSaveWrapper` (peft 0.18 to 0.21). Without it
    a swap would write into weights that an adapter goes by.
    """
    return hasattr(module, "base_layer") or hasattr(module, "original_module")


def is_saved_with_adapter(module: nn.Module) -> bool:
    """Return whether PEFT trains a copy of `module` in full, and saves it with the adapter.

    Touches `modules_to_save` of `ModulesToSaveWrapper` (peft 0.18 to 0.21). Without it position parameters that an
    adapter holds are taken for lost.
    """
    return hasattr(module, "modules_to_save")


def original_of(module: Any) -> Any:
    """Return the module of the model that PEFT has wrapped in `module`; `module` where it has not.

    Touches `original_module` of `ModulesToSaveWrapper` (peft 0.18 to 0.21). Without it a mechanism that is trained in
    full is taken for another one.
    """
    return getattr(module, "original_module", module)


def base_layer_of(module: Any) -> Any:
    """Return the module of the model that PEFT adds to in `module`, a tuner layer; `module` where it is none.

    Touches `base_layer` of tuner layers (peft 0.18 to 0.21). Without it the weights below an adapter are not found.
    """
    return getattr(module, "base_layer", module)


def trained_copies_of(module: Any) -> list[Any]:
    """Return the copies that PEFT trains in full in the place of `module`; [] where there is none.

    Touches `modules_to_save` of `ModulesToSaveWrapper` (peft 0.18 to 0.21). Without it what is set on a module does
    not reach the copy that is trained.
    """
    return list(getattr(module, "modules_to_save", {}).values())


def is_copy(path: str) -> bool:
    """Return whether the parameter at `path` is one of the copies that PEFT keeps of a module.

    Touches the names of `ModulesToSaveWrapper` in a path (peft 0.18 to 0.21). Without it a copy of a position table is
    taken for another table.
    """
    return not {"original_module", "modules_to_save"}.isdisjoint(path.split("."))


def name_without_adapter(name: str) -> str:
    """Return what the transformers model calls the parameter that a PEFT model calls `name`.

    Touches the names of wrappers in a state dict, and the prefix of `PeftModel` (peft 0.18 to 0.21). Without it the
    parameters of a swap are not found in a PEFT model.

    Example:
        >>> name_without_adapter("base_model.model.transformer.wte.modules_to_save.default.weight")
        'transformer.wte.weight'
    """
    return _WRAPPED.sub(".", name.removeprefix("base_model.model."))
