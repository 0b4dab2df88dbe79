"""The surgery of each edit at the position table, and how to undo it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from hf_posswap.families.modules import table_of
from hf_posswap.geometry import Geometry
from hf_posswap.patching.actions import RemoveHook, RestoreBuffer, RestoreChild, Undo
from hf_posswap.patching.embedding import (
    SENTINEL_SHAPE,
    BlendedTable,
    LengthHook,
    NoPositions,
    entry_signature,
    grow_buffer,
    grown_mask,
    replace_weight,
)
from hf_posswap.schemes.table import TableScheme


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
        computed: whether the state dict never held it, so that nothing need stand for it there.
    """

    takes_weights: ClassVar[bool] = True
    path: str
    rows: int | None
    computed: bool = False

    def apply(self, model: Any, undo: list[Undo]) -> None:
        table = model.get_submodule(self.path)
        undo.insert(0, RestoreChild(self.path, table))
        old = table_of(table)
        shape = SENTINEL_SHAPE if self.rows is None else (self.rows, old.shape[1])
        zeros = torch.zeros(shape, dtype=old.dtype, device=old.device)  # plain, where the table is quantised
        model.set_submodule(self.path, NoPositions(zeros, saved=not self.computed))


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
