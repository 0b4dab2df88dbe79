"""What edits take out of a model and put back: modules, buffers, hooks, and weights that accelerate keeps elsewhere.

Each pair uses the same keys of `saved` and finds modules by path, so that a change of a model can also be undone in a
deep copy of it.

A hook of `accelerate.dispatch_model` and similar functions leaves tensors on meta and stores their values in a map. A
position table that a swap reads or replaces is loaded into memory, and offloaded again when the swap is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_posswap.compat.accelerate_state import hook_of, offloading_hooks, set_hook, without_offload
from hf_posswap.compat.torch_tensors import holds_values
from hf_posswap.families.modules import owner_of, replace_everywhere
from hf_posswap.patching.edits.edit import Edit, Saved

KEPT_IN_MEMORY = "{} is offloaded by accelerate: it stays in memory until the swap is undone."


def replace_child(model: nn.Module, path: str, new: nn.Module, saved: Saved) -> None:
    """Replace the module at `path` by `new`."""
    saved["child"] = model.get_submodule(path)
    replace_everywhere(model, path, new)


def restore_child(model: nn.Module, path: str, saved: Saved) -> None:
    """Restore the module that `replace_child` replaced, moved and cast like the model since then."""
    module = saved.get("child")
    if module is None:
        return
    reference = next((p for p in model.parameters() if p.device.type != "meta"), None)
    if reference is not None and all(map(holds_values, (*module.parameters(), *module.buffers()))):
        module.to(reference.device)
    substitute = next(model.get_submodule(path).buffers(recurse=False), None)  # it was cast with the model
    if substitute is not None:
        for parameter in module.parameters():
            parameter.data = parameter.data.to(substitute.dtype)
        if "weights" in dict(module.named_buffers(recurse=False)):  # a computed table
            module.weights = module.weights.to(substitute.dtype)
    replace_everywhere(model, path, module)


def replace_buffer(model: nn.Module, path: str, change: Callable[[object, Tensor], Tensor], saved: Saved) -> None:
    """Replace the buffer at `path` by `change(its module, the buffer)`."""
    owner, leaf = owner_of(model, path)
    saved.setdefault("buffers", {})[path] = old = getattr(owner, leaf)
    setattr(owner, leaf, change(owner, old))


def restore_buffers(model: nn.Module, saved: Saved) -> None:
    """Restore the buffers that `replace_buffer` replaced, on the model's current devices."""
    for path, old in saved.get("buffers", {}).items():
        owner, leaf = owner_of(model, path)
        current = getattr(owner, leaf)
        setattr(owner, leaf, _within(current, old) if old.is_meta else old.to(current.device))


def _within(current: Tensor, old: Tensor) -> Tensor:
    """Return the region of `current` with the shape of `old`; in a model built on meta it has the initial values."""
    same_axes = current.dim() == old.dim()
    return current[tuple(map(slice, old.shape))] if same_axes else current[..., : old.shape[-1]]


def replace_attribute(model: nn.Module, path: str, name: str, value: object, saved: Saved) -> None:
    """Set the attribute `name` of the module at `path`."""
    module = model.get_submodule(path)
    saved.setdefault("attributes", {})[name] = getattr(module, name)
    setattr(module, name, value)


def restore_attributes(model: nn.Module, path: str, saved: Saved) -> None:
    """Restore the attributes that `replace_attribute` changed."""
    for name, value in saved.get("attributes", {}).items():
        setattr(model.get_submodule(path), name, value)


@dataclass(frozen=True)
class _KeptHook:
    """The handle of a hook; a copy is a handle in the copied model, or does nothing where the module is gone.

    torch cannot copy the handle of a module that no longer exists, such as a layer that was taken out of the model.
    """

    handle: RemovableHandle | None

    def __reduce__(self) -> tuple[object, ...]:
        is_gone = self.handle is None or self.handle.hooks_dict_ref() is None
        return _KeptHook, (None if is_gone else self.handle,)


def keep_hooks(saved: Saved, *handles: RemovableHandle) -> None:
    """Store the handles of registered hooks."""
    saved.setdefault("hooks", []).extend(map(_KeptHook, handles))


def remove_hooks(saved: Saved) -> None:
    """Remove the hooks that `keep_hooks` stored."""
    for hook in saved.pop("hooks", []):
        if hook.handle is not None:
            hook.handle.remove()


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


def weight_maps(model: nn.Module) -> dict[int, object]:
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
    hook: object
    placeholders: dict[str, Tensor]

    def __call__(self, model: nn.Module) -> None:
        module = model.get_submodule(self.at)
        set_hook(module, self.hook)
        for name, tensor in self.placeholders.items():
            setattr(module, name, tensor)


def bring_into_memory(model: nn.Module, path: str) -> OffloadAgain:
    """Load the offloaded weights of the module at `path` into memory, and return a callable that undoes this."""
    module = model.get_submodule(path)
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
