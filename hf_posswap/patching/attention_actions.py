"""The surgery of each edit inside attention, and how to undo it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from hf_posswap.patching.actions import RemoveChild, RemoveHook, Undo
from hf_posswap.patching.attention import cache_argument
from hf_posswap.patching.attention_hooks import PositionHook, StartHook
from hf_posswap.patching.config_view import ConfigView
from hf_posswap.patching.embedding import (
    entry_signature,
)
from hf_posswap.patching.offloaded import device_of
from hf_posswap.patching.positions import ForwardMemo
from hf_posswap.schemes.base import Mechanism


@dataclass
class RestoreConfigView:
    """Gives an attention module the model's config again."""

    path: str

    def __call__(self, model: nn.Module) -> None:
        module: Any = model.get_submodule(self.path)
        module.config = module.config.native


@dataclass(frozen=True)
class AddMechanism:
    """Registers the scheme's module on the base model and hooks that keep forwards apart."""

    path: str
    entry: str
    mechanism: Mechanism
    memo: ForwardMemo

    def apply(self, model: Any, undo: list[Undo]) -> None:
        device = device_of(model)
        if device.type != "meta":
            self.mechanism.to(device)
        model.set_submodule(self.path, self.mechanism)
        undo.insert(0, RemoveChild(self.path))
        entry = model.get_submodule(self.entry)
        owner, _, leaf = self.path.rpartition(".")
        start = StartHook(model.get_submodule(owner), leaf, self.memo, entry_signature(entry))
        undo.insert(0, RemoveHook(entry.register_forward_pre_hook(start, with_kwargs=True)))
        undo.insert(0, RemoveHook(entry.register_forward_hook(start.stop)))


@dataclass(frozen=True)
class PatchAttention:
    """Puts the scheme between one attention module's projections and its attention implementation.

    Attributes:
        path: of the attention module.
        carried: path of the mechanism, which is there already.
        memo: shared by the layers of the model.
        first: what the model's `position_ids` call position 0.
        layer: which of the model's attention layers it is, counted from 0.
    """

    path: str
    carried: str
    memo: ForwardMemo
    first: int
    layer: int
    hook: ClassVar[type[PositionHook]] = PositionHook

    def apply(self, model: Any, undo: list[Undo]) -> None:
        module = model.get_submodule(self.path)
        module.config = ConfigView(module.config)
        undo.insert(0, RestoreConfigView(self.path))
        name = cache_argument(module)
        owner, _, leaf = self.carried.rpartition(".")
        hook = self.hook(model.get_submodule(owner), leaf, self.memo, name, self.first, self.layer)
        undo.insert(0, RemoveHook(module.register_forward_pre_hook(hook, with_kwargs=True)))
