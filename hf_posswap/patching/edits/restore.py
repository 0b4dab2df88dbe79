"""Reversible changes of a module, a buffer, an attribute or its hooks.

Each pair uses the same keys of `saved` and finds modules by path, so that a change of a model can also be undone in a
deep copy of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_posswap.compat.torch_fake import holds_values
from hf_posswap.families.modules import owner_of, replace_everywhere
from hf_posswap.patching.edits.edit import Saved


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


def replace_buffer(model: nn.Module, path: str, change: Callable[[Any, Tensor], Tensor], saved: Saved) -> None:
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


def replace_attribute(model: nn.Module, path: str, name: str, value: Any, saved: Saved) -> None:
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

    def __reduce__(self) -> tuple[Any, ...]:
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
