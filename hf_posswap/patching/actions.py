"""The surgery of each edit, and how to undo it: the only code that changes a model.

Every action does one thing to one instance and leaves an undo behind. Undos name modules by path, so they stay right
in a deep copy of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_posswap.families.rope_config import config_at
from hf_posswap.patching.embedding import (
    is_mask,
)


class Undo(Protocol):
    """Takes one change back."""

    def __call__(self, model: nn.Module) -> None: ...


class Action(Protocol):
    """Makes one change to `model`; what takes it back goes to the front of `undo`."""

    def apply(self, model: Any, undo: list[Undo]) -> None: ...


@dataclass
class RestoreChild:
    """Puts `module` back at `path`, its parameters where the model has moved meanwhile, and cast as it was."""

    path: str
    module: nn.Module

    def __call__(self, model: nn.Module) -> None:
        reference = next((p for p in model.parameters() if p.device.type != "meta"), None)
        if reference is not None and not any(
            one.is_meta for one in (*self.module.parameters(), *self.module.buffers())
        ):
            self.module.to(reference.device)
        substitute = next(model.get_submodule(self.path).buffers(recurse=False), None)  # it was cast with the model
        if substitute is not None:
            for parameter in self.module.parameters():
                parameter.data = parameter.data.to(substitute.dtype)
            if "weights" in dict(self.module.named_buffers(recurse=False)):  # a table that is computed
                self.module.weights = self.module.weights.to(substitute.dtype)
        model.set_submodule(self.path, self.module)


@dataclass
class RestoreBuffer:
    """Puts a buffer back."""

    path: str
    buffer: torch.Tensor

    def __call__(self, model: nn.Module) -> None:
        owner, _, leaf = self.path.rpartition(".")
        current = getattr(model.get_submodule(owner), leaf)
        # a model that was built on meta has what it began with in what it has now
        old = self.buffer.to(current.device) if not self.buffer.is_meta else current[..., : self.buffer.shape[-1]]
        if self.buffer.is_meta and is_mask(self.buffer):
            old = old[..., : self.buffer.shape[-2], :]
        setattr(model.get_submodule(owner), leaf, old)


@dataclass
class RemoveChild:
    """Deletes a submodule that a patch added."""

    path: str

    def __call__(self, model: nn.Module) -> None:
        owner, _, leaf = self.path.rpartition(".")
        delattr(model.get_submodule(owner), leaf)


@dataclass
class RemoveHook:
    """Removes a hook."""

    handle: RemovableHandle

    def __call__(self, model: nn.Module) -> None:
        self.handle.remove()


@dataclass
class RestoreAttribute:
    """Sets a plain attribute back."""

    path: str
    name: str
    value: Any

    def __call__(self, model: nn.Module) -> None:
        setattr(model.get_submodule(self.path), self.name, self.value)


@dataclass(frozen=True)
class SetAttribute:
    """Sets a plain attribute of a module to what a fresh model of the new config has there."""

    path: str
    name: str
    before: Any
    after: Any

    def apply(self, model: Any, undo: list[Undo]) -> None:
        undo.insert(0, RestoreAttribute(self.path, self.name, self.before))
        setattr(model.get_submodule(self.path), self.name, self.after)

    def problem(self, model: Any) -> str | None:
        """Return what is wrong where this was carried out, or None."""
        held = getattr(model.get_submodule(self.path), self.name, self.after)  # BigBird exchanges modules by itself
        return None if held == self.after else f"it is {held!r} instead of {self.after!r}"


@dataclass(frozen=True)
class EditConfig:
    """Sets a value, by its path, of the model's config, which is the swapped model's own copy and needs no undo."""

    name: str
    value: Any

    def apply(self, model: Any, undo: list[Undo]) -> None:
        part, _, leaf = self.name.rpartition(".")
        setattr(config_at(model.config, part), leaf, self.value)
