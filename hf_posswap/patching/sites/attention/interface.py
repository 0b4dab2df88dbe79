"""Attention classes with the AttentionInterface, for modules whose own lacks it, and their native positions."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_posswap.compat.torch_modules import give_class
from hf_posswap.families.modules import replace_everywhere
from hf_posswap.patching.edits.edit import Edit, Saved
from hf_posswap.patching.edits.offload import stored
from hf_posswap.patching.edits.placeholder import NoPositions
from hf_posswap.patching.edits.restore import replace_child, restore_child
from hf_posswap.patching.edits.stock_weights import not_zero
from hf_posswap.patching.record.refusals import SENTINEL_SHAPE

NATIVE_POSITIONS = "native_positions"
"""Attribute of an attention class: whether it applies the positions that its original applies inside attention."""


@dataclass(frozen=True, kw_only=True)
class AttendThroughInterface(Edit):
    """Makes an attention module attend through the AttentionInterface.

    Attributes:
        module: that defines the class: a subclass of the attention module's own, with the interface.
        name: of the class.
        layer: of the cache that it writes.
        native_positions: whether positions that are native inside attention stay.
    """

    module: str
    name: str
    layer: int
    native_positions: bool

    @property
    def cls(self) -> Any:
        """The class with the interface."""
        return getattr(importlib.import_module(self.module), self.name)

    def apply(self, model: Any, saved: Saved) -> None:
        module, cls = model.get_submodule(self.path), self.cls
        wanted = {"config": model.config, "layer_idx": self.layer}
        given = {name: value for name, value in wanted.items() if not hasattr(module, name)}
        if hasattr(cls, NATIVE_POSITIONS) and not self.native_positions:
            given[NATIVE_POSITIONS] = False
        saved |= {"native": type(module), "given": tuple(given)}
        give_class(module, cls)
        for name, value in given.items():
            setattr(module, name, value)

    def undo(self, model: Any, saved: Saved) -> None:
        """Give the module its own class back, and take away the attributes that it was given."""
        if "native" not in saved:
            return
        module = model.get_submodule(self.path)
        for name in saved["given"]:
            vars(module).pop(name, None)
        give_class(module, saved["native"])

    def check(self, model: Any) -> str | None:
        module = model.get_submodule(self.path)
        if not isinstance(module, self.cls):
            return f"its class is {type(module).__name__} instead of {self.name}"
        positions = getattr(module, NATIVE_POSITIONS, self.native_positions)
        return None if positions == self.native_positions else "its native positions are in force again"

    def reload(self, model: Any) -> None:
        self.apply(model, {})

    @property
    def touches(self) -> tuple[str, ...]:
        return ()


class AtPositionZero(nn.Module):
    """A module that makes angles, with every token at position 0: the identity rotation, at any length.

    Args:
        native: the model's own module, which is called with zeros instead of positions; `unpatch_model` restores it.
    """

    def __init__(self, native: nn.Module) -> None:
        super().__init__()
        self.native = native

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `native` returns for position 0 everywhere."""
        return self.native(*map(_at_zero, args), **{name: _at_zero(value) for name, value in kwargs.items()})


def _at_zero(value: Any) -> Any:
    counts = isinstance(value, Tensor) and not value.is_floating_point()
    return torch.zeros_like(value) if counts else value


@dataclass(frozen=True, kw_only=True)
class StopRotation(Edit):
    """Has the module that makes the angles of positions inside attention make those of position 0 alone."""

    def apply(self, model: Any, saved: Saved) -> None:
        replace_child(model, self.path, AtPositionZero(model.get_submodule(self.path)), saved)

    def undo(self, model: Any, saved: Saved) -> None:
        replaced = model.get_submodule(self.path)
        if isinstance(replaced, AtPositionZero):
            replace_everywhere(model, self.path, replaced.native)

    def check(self, model: Any) -> str | None:
        stopped = isinstance(model.get_submodule(self.path), AtPositionZero)
        return None if stopped else "the native rotation is in force again"

    def reload(self, model: Any) -> None:
        """Nothing: no stock class loads a scheme inside attention."""

    @property
    def touches(self) -> tuple[str, ...]:
        return ()


class NoRows(NoPositions):
    """Stands where an embedding was from which a model makes positions inside attention; all its rows are zero.

    Args:
        weight: one lone zero, [1]: the native class fails to load it with a size mismatch; or zeros, [P, W].
        width: W, of a row.
    """

    def __init__(self, weight: Tensor, width: int) -> None:
        super().__init__(weight)
        self.width = width

    def forward(self, index: Any = None, *_: Any, **__: Any) -> Tensor:
        """Return zeros, [..., W] for an `index` [...], or one row [1, W] where the model gives no index."""
        if isinstance(index, Tensor):
            return self.weight.new_zeros((*index.shape, self.width), device=index.device)
        return self.weight.new_zeros((1, self.width))


@dataclass(frozen=True, kw_only=True)
class RemoveRows(Edit):
    """Takes away the rows of an embedding that positions inside attention are made from.

    Attributes:
        native: whether zeros of its shape stand for it in the state dict, so that stock classes run it; otherwise they
            refuse it.
    """

    needs_weights: ClassVar[bool] = True
    native: bool

    def apply(self, model: Any, saved: Saved) -> None:
        weight = model.get_submodule(self.path).weight
        zeros = weight.new_zeros(weight.shape if self.native else SENTINEL_SHAPE).detach()
        replace_child(model, self.path, NoRows(zeros, weight.shape[1]), saved)

    def undo(self, model: Any, saved: Saved) -> None:
        restore_child(model, self.path, saved)

    def check(self, model: Any) -> str | None:
        module = model.get_submodule(self.path)
        empty = isinstance(module, NoRows) and module.is_empty
        return None if empty else "the rows that native positions are made from are still there"

    def check_loaded(self, model: Any) -> str | None:
        return not_zero(stored(model.get_submodule(self.path), "weight"))

    def reload(self, model: Any) -> None:
        """Give a natively loaded model, whose rows are zeros that could be trained, rows that stay zeros."""
        self.apply(model, {})

    @property
    def touches(self) -> tuple[str, ...]:
        return (f"{self.path}.",)


@dataclass(frozen=True, kw_only=True)
class CopyRows(Edit):
    """Begins a scheme's learned table with the rows from which the same mechanism was made natively.

    Attributes:
        source: path of the embedding that holds them.
        carried: path of the scheme's mechanism, whose `table` takes them.
    """

    source: str
    carried: str

    def apply(self, model: Any, saved: Saved) -> None:
        rows, table = model.get_submodule(self.source).weight, model.get_submodule(self.carried).table
        if not rows.is_meta and not table.is_meta:
            table.data.copy_(rows.detach())

    def undo(self, model: Any, saved: Saved) -> None:
        """Nothing: the mechanism goes as a whole."""

    def check(self, model: Any) -> str | None:
        """Return None: the rows may have been trained since."""
        return None

    def reload(self, model: Any) -> None:
        """Nothing: no stock class loads a scheme inside attention."""

    @property
    def touches(self) -> tuple[str, ...]:
        return (f"{self.carried}.",)
