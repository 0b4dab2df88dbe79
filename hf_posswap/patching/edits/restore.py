"""Ways to change a module, a buffer, an attribute or its hooks that remember what was there, and to put it back.

Each pair works on the same `saved`, under the same names, and finds modules by their paths, so that what was changed in
a model is put back right in a deep copy of it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hf_posswap.compat.torch_fake import holds_values
from hf_posswap.families.modules import owner_of
from hf_posswap.patching.edits.edit import Saved


def replace_child(model: nn.Module, path: str, new: nn.Module, saved: Saved) -> None:
    """Put `new` in the place of the module at `path`."""
    saved["child"] = model.get_submodule(path)
    model.set_submodule(path, new)


def restore_child(model: nn.Module, path: str, saved: Saved) -> None:
    """Put the module back that `replace_child` took, moved and cast as the model was meanwhile."""
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
        if "weights" in dict(module.named_buffers(recurse=False)):  # a table that is computed
            module.weights = module.weights.to(substitute.dtype)
    model.set_submodule(path, module)


def replace_buffer(model: nn.Module, path: str, change: Callable[[Any, Tensor], Tensor], saved: Saved) -> None:
    """Put what `change` makes of its module and of itself in the place of the buffer at `path`."""
    owner, leaf = owner_of(model, path)
    saved.setdefault("buffers", {})[path] = old = getattr(owner, leaf)
    setattr(owner, leaf, change(owner, old))


def restore_buffers(model: nn.Module, saved: Saved) -> None:
    """Put the buffers back that `replace_buffer` took, each where the model has moved meanwhile."""
    for path, old in saved.get("buffers", {}).items():
        owner, leaf = owner_of(model, path)
        current = getattr(owner, leaf)
        setattr(owner, leaf, _within(current, old) if old.is_meta else old.to(current.device))


def _within(current: Tensor, old: Tensor) -> Tensor:
    """Return the part of `current` that has the shape of `old`: a model built on meta has there what it began with."""
    same_axes = current.dim() == old.dim()
    return current[tuple(map(slice, old.shape))] if same_axes else current[..., : old.shape[-1]]


def replace_attribute(model: nn.Module, path: str, name: str, value: Any, saved: Saved) -> None:
    """Set the attribute `name` of the module at `path`."""
    module = model.get_submodule(path)
    saved.setdefault("attributes", {})[name] = getattr(module, name)
    setattr(module, name, value)


def restore_attributes(model: nn.Module, path: str, saved: Saved) -> None:
    """Set the attributes back that `replace_attribute` changed."""
    for name, value in saved.get("attributes", {}).items():
        setattr(model.get_submodule(path), name, value)


def keep_hooks(saved: Saved, *handles: Any) -> None:
    """Remember the handles of hooks that were registered."""
    saved.setdefault("hooks", []).extend(handles)


def remove_hooks(saved: Saved) -> None:
    """Remove the hooks that `keep_hooks` remembers."""
    for handle in saved.pop("hooks", []):
        handle.remove()
