"""The surgery of each edit, and how to undo it: the only code that changes a model.

Every action does one thing to one instance and leaves an undo behind. Undos name modules by path, so they stay right
in a deep copy of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_posswap.families.modules import table_of
from hf_posswap.families.rope_config import config_at
from hf_posswap.geometry import Geometry
from hf_posswap.patching.attention import PositionHook, StartHook, cache_argument
from hf_posswap.patching.config_view import ConfigView
from hf_posswap.patching.embedding import (
    SENTINEL_SHAPE,
    BlendedTable,
    LengthHook,
    NoPositions,
    entry_signature,
    grow_buffer,
    grown_mask,
    is_mask,
    replace_weight,
)
from hf_posswap.patching.offloaded import device_of
from hf_posswap.patching.positions import ForwardMemo
from hf_posswap.patching.rotary import KeepAngles, NeutralRotary, rebuilt
from hf_posswap.schemes.base import Mechanism
from hf_posswap.schemes.table import TableScheme


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
        if reference is not None:
            self.module.to(reference.device)
        substitute = next(model.get_submodule(self.path).buffers(recurse=False), None)  # it was cast with the model
        if substitute is not None:
            for parameter in self.module.parameters():
                parameter.data = parameter.data.to(substitute.dtype)
            if "weights" in dict(self.module.named_buffers(recurse=False)):  # a table that is computed
                self.module.weights = self.module.weights.to(substitute.dtype)
        model.set_submodule(self.path, self.module)


@dataclass
class RestoreWeight:
    """Puts the table `weight` back into the embedding at `path`."""

    path: str
    weight: nn.Parameter

    def __call__(self, model: nn.Module) -> None:
        held: Any = model.get_submodule(self.path)
        embedding = getattr(held, "original_module", held)  # PEFT wraps what it trains in full, and keeps copies
        self.weight.data = self.weight.data.to(embedding.weight)  # device and dtype
        embedding.weight = self.weight
        embedding.num_embeddings = self.weight.shape[0]
        for trained in getattr(held, "modules_to_save", {}).values():
            trained.weight = nn.Parameter(self.weight.detach().clone(), requires_grad=trained.weight.requires_grad)
            trained.num_embeddings = self.weight.shape[0]


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
class RestoreConfigView:
    """Gives an attention module the model's config again."""

    path: str

    def __call__(self, model: nn.Module) -> None:
        module: Any = model.get_submodule(self.path)
        module.config = module.config.native


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


@dataclass(frozen=True)
class ReplaceTable:
    """Writes a table scheme's rows into the model's own table; rows before position 0 stay."""

    takes_weights: ClassVar[bool] = True
    path: str
    scheme: TableScheme
    rows: int
    offset: int
    geometry: Geometry

    def apply(self, model: Any, undo: list[Undo]) -> None:
        embedding = model.get_submodule(self.path)
        old = embedding.weight
        undo.insert(0, RestoreWeight(self.path, old))
        if old.is_meta:
            new = torch.empty(self.rows + self.offset, old.shape[1], device="meta")
        else:
            rows = self.scheme.table(old.detach()[self.offset :], self.rows, self.geometry)
            new = torch.cat((old.detach()[: self.offset].float().cpu(), rows))
        replace_weight(embedding, new, trainable=self.scheme.trainable)


@dataclass
class RestoreBlended:
    """Puts the table that faded back, with the weights that it has now."""

    path: str

    def __call__(self, model: nn.Module) -> None:
        blended: Any = model.get_submodule(self.path)
        blended.native.weight = blended.old
        model.set_submodule(self.path, blended.native)


@dataclass(frozen=True)
class BlendTable:
    """Lets the table fade, and a new one of the same size come in its place where there is one.

    Attributes:
        scheme: of the new table, or None.
        share: of the new mechanism, in [0, 1].
    """

    takes_weights: ClassVar[bool] = True
    path: str
    scheme: TableScheme | None
    share: float
    offset: int
    geometry: Geometry

    def apply(self, model: Any, undo: list[Undo]) -> None:
        native = model.get_submodule(self.path)
        undo.insert(0, RestoreBlended(self.path))
        model.set_submodule(self.path, BlendedTable(native, self._new(native.weight), self.share, self.offset))

    def _new(self, old: torch.Tensor) -> torch.Tensor | None:
        if self.scheme is None:
            return None
        rows = old.shape[0] - self.offset
        if old.is_meta:
            return torch.empty(rows, old.shape[1], dtype=old.dtype, device="meta")
        fitted = self.scheme.fit(old.detach()[self.offset :], self.geometry)
        new = fitted.table(old.detach()[self.offset :], rows, self.geometry).to(old)
        return nn.Parameter(new) if self.scheme.trainable else new


@dataclass(frozen=True)
class RemoveTable:
    """Takes the table away.

    Attributes:
        rows: zero rows that stand for it in the state dict; None: one lone zero, so that stock classes refuse.
    """

    takes_weights: ClassVar[bool] = True
    path: str
    rows: int | None

    def apply(self, model: Any, undo: list[Undo]) -> None:
        table = model.get_submodule(self.path)
        undo.insert(0, RestoreChild(self.path, table))
        old = table_of(table)
        shape = SENTINEL_SHAPE if self.rows is None else (self.rows, old.shape[1])
        zeros = torch.zeros(shape, dtype=old.dtype, device=old.device)  # plain, where the table is quantised
        model.set_submodule(self.path, NoPositions(zeros))


@dataclass
class RestoreSavedKeys:
    """Lets the model's class say again what is left out of its checkpoints."""

    before: Any

    def __call__(self, model: nn.Module) -> None:
        held: Any = model
        if held._keys_to_ignore_on_save is not self.before:
            held._keys_to_ignore_on_save = self.before
        if getattr(type(held), "_keys_to_ignore_on_save", None) == self.before:
            vars(held).pop("_keys_to_ignore_on_save", None)


@dataclass(frozen=True)
class SaveKeys:
    """Makes the model save keys that its class leaves out of checkpoints."""

    keys: tuple[str, ...]

    def apply(self, model: Any, undo: list[Undo]) -> None:
        before = model._keys_to_ignore_on_save
        undo.insert(0, RestoreSavedKeys(before))
        model._keys_to_ignore_on_save = [key for key in before if key not in self.keys]

    def problem(self, model: Any) -> str | None:
        """Return what is wrong where this was carried out, or None."""
        left_out = [key for key in self.keys if key in (model._keys_to_ignore_on_save or ())]
        return f"{', '.join(left_out)} would not be saved" if left_out else None


@dataclass(frozen=True)
class RebuildRotary:
    """Replaces a rotary module by a new one of its class, built from the config with the new rope parameters.

    Attributes:
        path: of the module.
        config: the part of the swapped model's config that says them.
        part: path of that part.
    """

    path: str
    config: Any
    part: str

    def apply(self, model: Any, undo: list[Undo]) -> None:
        old = model.get_submodule(self.path)
        undo.insert(0, RestoreChild(self.path, old))
        new: Any = rebuilt(old, self.config)
        new.config = config_at(model.config, self.part)
        device = next(old.buffers()).device
        new.register_forward_pre_hook(KeepAngles(new))
        model.set_submodule(self.path, new.to(device))


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
class NeutraliseRotary:
    """Makes a rotary module rotate by nothing, so that raw keys reach the attention site.

    Attributes:
        path: of the module.
        config: the part of the config, as it was, that the module goes on reading.
        sets: of its frequencies that are neutral; see `families.rope_config`.
    """

    path: str
    config: Any
    sets: tuple[str, ...]

    def apply(self, model: Any, undo: list[Undo]) -> None:
        native = model.get_submodule(self.path)
        undo.insert(0, RestoreChild(self.path, native))
        native.config = self.config
        model.set_submodule(self.path, NeutralRotary(native, self.sets))


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


@dataclass(frozen=True)
class GuardLength:
    """Makes the model say where its table ends, or make room where it does not."""

    entry: str
    capacity: int | None
    offset: int
    first: int
    buffers: tuple[str, ...]
    length: int

    def apply(self, model: Any, undo: list[Undo]) -> None:
        for path in self.buffers:
            owner, _, leaf = path.rpartition(".")
            undo.insert(0, RestoreBuffer(path, getattr(model.get_submodule(owner), leaf)))
            grow_buffer(model, path, self.length + self.offset)
        entry = model.get_submodule(self.entry)
        below = tuple(path.removeprefix(self.entry).lstrip(".") for path in self.buffers)
        signature = entry_signature(entry)
        hook = LengthHook(type(model).__name__, self.capacity, self.offset, self.first, below, signature)
        undo.insert(0, RemoveHook(entry.register_forward_pre_hook(hook, with_kwargs=True)))


@dataclass(frozen=True)
class GrowMask:
    """Gives a causal mask [..., P, P] the length that the config says: stock code makes it again of that size."""

    path: str
    length: int

    def apply(self, model: Any, undo: list[Undo]) -> None:
        owner_path, _, leaf = self.path.rpartition(".")
        owner = model.get_submodule(owner_path)
        old = getattr(owner, leaf)
        undo.insert(0, RestoreBuffer(self.path, old))
        setattr(owner, leaf, grown_mask(owner, old, self.length))

    def problem(self, model: Any) -> str | None:
        """Return what is wrong where this was carried out, or None."""
        held = model.get_buffer(self.path).shape[-1]
        return None if held == self.length else f"its mask is of {held} positions instead of {self.length}"


@dataclass(frozen=True)
class EditConfig:
    """Sets a value, by its path, of the model's config, which is the swapped model's own copy and needs no undo."""

    name: str
    value: Any

    def apply(self, model: Any, undo: list[Undo]) -> None:
        part, _, leaf = self.name.rpartition(".")
        setattr(config_at(model.config, part), leaf, self.value)
