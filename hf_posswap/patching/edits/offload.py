"""Weights that accelerate keeps elsewhere: its hooks bring them for a forward, and what a swap changes, for good.

A hook of `accelerate.dispatch_model` and its kin leaves tensors on meta and holds their values in a map. A position
table that a swap reads or replaces is brought into memory while the swap is in force, and goes back with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posswap.compat.accelerate_hooks import hook_of, offloading_hooks, set_hook, without_offload
from hf_posswap.patching.edits.edit import Edit

KEPT_IN_MEMORY = "{} is offloaded by accelerate: while the swap is in force it stays in memory."


def stored(module: nn.Module, name: str) -> Tensor:
    """Return the tensor `name` of `module`: from where it is kept, if it is offloaded; on meta if it is nowhere."""
    held: Tensor = getattr(module, name)
    if held.is_meta:
        for hook in offloading_hooks(module):
            return hook.weights_map[name]
    return held


def device_of(model: nn.Module) -> torch.device:
    """Return where the first weights of `model` are, or come to be in a forward; meta if they are nowhere."""
    found = next((p.device for p in model.parameters() if not p.is_meta), None)
    if found is None:
        places = (hook.execution_device for module in model.modules() for hook in offloading_hooks(module))
        found = next((place for place in places if place is not None), None)
    if found is None:
        return next(model.parameters()).device
    return torch.device(found)


def weight_maps(model: nn.Module) -> dict[int, Any]:
    """Return the maps of offloaded weights in `model` by their id: a copy of the model that shares weights has them."""
    hooks = [hook for module in model.modules() for hook in offloading_hooks(module)]
    return {id(held): held for hook in hooks for held in (hook.weights_map, hook.tied_params_map) if held is not None}


def bring_all(module: nn.Module) -> None:
    """Give `module` and all in it their weights that are offloaded, for good."""
    for path, part in module.named_modules():
        if any(offloading_hooks(part)):
            bring_into_memory(module, path)


@dataclass
class OffloadAgain:
    """Puts the tensors of a module on meta again, and its hook back, which holds their values.

    Attributes:
        at: path of the module.
        hook: that it had.
        held: the tensors that stood for its own.
    """

    at: str
    hook: Any
    held: dict[str, Tensor]

    def __call__(self, model: nn.Module) -> None:
        module: Any = model.get_submodule(self.at)
        set_hook(module, self.hook)
        for name, tensor in self.held.items():
            setattr(module, name, tensor)


def bring_into_memory(model: nn.Module, path: str) -> OffloadAgain:
    """Give the module at `path` its weights that are offloaded, and return what takes that back."""
    module: Any = model.get_submodule(path)
    hook = next(offloading_hooks(module))
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    held = {name: tensor for name, tensor in tensors if tensor.is_meta}
    back = OffloadAgain(path, hook_of(module), held)
    device = device_of(model) if hook.execution_device is None else hook.execution_device
    for name, tensor in held.items():
        value = hook.weights_map[name].to(device, copy=True)
        parameter = isinstance(tensor, nn.Parameter)
        setattr(module, name, nn.Parameter(value, requires_grad=tensor.requires_grad) if parameter else value)
    set_hook(module, without_offload(hook_of(module)))
    return back


def offloaded_tables(model: nn.Module, edits: Iterable[Edit]) -> list[str]:
    """Return the paths of what `edits` read or replace for its weights, where they are offloaded."""
    paths = dict.fromkeys(edit.path for edit in edits if edit.needs_weights)
    return [path for path in paths if any(offloading_hooks(model.get_submodule(path)))]
