"""Weights that accelerate offloads: its hooks load them for a forward; those that a swap changes stay in memory.

A hook of `accelerate.dispatch_model` and similar functions leaves tensors on meta and stores their values in a map. A
position table that a swap reads or replaces is loaded into memory, and offloaded again when the swap is undone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posswap.compat.accelerate_hooks import hook_of, offloading_hooks, set_hook, without_offload
from hf_posswap.patching.edits.edit import Edit

KEPT_IN_MEMORY = "{} is offloaded by accelerate: it stays in memory until the swap is undone."


def stored(module: nn.Module, name: str) -> Tensor:
    """Return the tensor `name` of `module`, from accelerate's map if it is offloaded; on meta if it has no values."""
    tensor: Tensor = getattr(module, name)
    if tensor.is_meta:
        for hook in offloading_hooks(module):
            return hook.weights_map[name]
    return tensor


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the first weights of `model`, or their device in a forward; meta if they have no values."""
    device = next((p.device for p in model.parameters() if not p.is_meta), None)
    if device is None:
        devices = (hook.execution_device for module in model.modules() for hook in offloading_hooks(module))
        device = next((candidate for candidate in devices if candidate is not None), None)
    if device is None:
        return next(model.parameters()).device
    return torch.device(device)


def weight_maps(model: nn.Module) -> dict[int, Any]:
    """Return the maps of offloaded weights in `model` by id: a copy of the model that shares weights shares them."""
    hooks = [hook for module in model.modules() for hook in offloading_hooks(module)]
    maps = (weights for hook in hooks for weights in (hook.weights_map, hook.tied_params_map))
    return {id(weights): weights for weights in maps if weights is not None}


def bring_all(module: nn.Module) -> None:
    """Load all offloaded weights of `module` and its submodules into memory, permanently."""
    for path, submodule in module.named_modules():
        if any(offloading_hooks(submodule)):
            bring_into_memory(module, path)


@dataclass
class OffloadAgain:
    """Restores the meta tensors of a module and its hook, which stores their values.

    Attributes:
        at: path of the module.
        hook: its original hook.
        placeholders: its meta tensors.
    """

    at: str
    hook: Any
    placeholders: dict[str, Tensor]

    def __call__(self, model: nn.Module) -> None:
        module: Any = model.get_submodule(self.at)
        set_hook(module, self.hook)
        for name, tensor in self.placeholders.items():
            setattr(module, name, tensor)


def bring_into_memory(model: nn.Module, path: str) -> OffloadAgain:
    """Load the offloaded weights of the module at `path` into memory, and return a callable that undoes this."""
    module: Any = model.get_submodule(path)
    hook = next(offloading_hooks(module))
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    placeholders = {name: tensor for name, tensor in tensors if tensor.is_meta}
    back = OffloadAgain(path, hook_of(module), placeholders)
    device = device_of(model) if hook.execution_device is None else hook.execution_device
    for name, tensor in placeholders.items():
        value = hook.weights_map[name].to(device, copy=True)
        parameter = isinstance(tensor, nn.Parameter)
        setattr(module, name, nn.Parameter(value, requires_grad=tensor.requires_grad) if parameter else value)
    set_hook(module, without_offload(hook_of(module)))
    return back


def offloaded_tables(model: nn.Module, edits: Iterable[Edit]) -> list[str]:
    """Return the paths of modules with offloaded weights that `edits` read or replace."""
    paths = dict.fromkeys(edit.path for edit in edits if edit.needs_weights)
    return [path for path in paths if any(offloading_hooks(model.get_submodule(path)))]
