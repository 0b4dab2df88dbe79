"""Giving one attention module a class that attends through transformers' AttentionInterface, and taking it back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from hf_posswap.patching.actions import RestoreChild, Undo
from hf_posswap.patching.embedding import SENTINEL_SHAPE, NoPositions

NATIVE_POSITIONS = "native_positions"
"""Attribute of an attention class: whether it applies the positions that its original applies inside attention."""


def give_class(module: Any, cls: Any) -> None:
    """Make `module` an instance of `cls`, its accelerate hooks included: they keep the forward that they wrap."""
    module.__class__ = cls
    if "_old_forward" in vars(module):
        module._old_forward = cls.forward.__get__(module)


@dataclass
class RestoreClass:
    """Gives an attention module its own class back, and takes away the attributes that it was given."""

    path: str
    native: type
    given: tuple[str, ...]

    def __call__(self, model: nn.Module) -> None:
        module = model.get_submodule(self.path)
        for name in self.given:
            delattr(module, name)
        give_class(module, self.native)


@dataclass(frozen=True)
class AttendThroughInterface:
    """Makes an attention module attend through the AttentionInterface.

    Attributes:
        path: of the attention module.
        cls: a subclass of its class, with the interface.
        layer: of the cache that it writes.
        native_positions: whether positions that are native inside attention stay.
    """

    path: str
    cls: Any
    layer: int
    native_positions: bool

    def apply(self, model: Any, undo: list[Undo]) -> None:
        module = model.get_submodule(self.path)
        wanted = {"config": model.config, "layer_idx": self.layer}
        given = {name: value for name, value in wanted.items() if not hasattr(module, name)}
        if hasattr(self.cls, NATIVE_POSITIONS) and not self.native_positions:
            given[NATIVE_POSITIONS] = False
        undo.insert(0, RestoreClass(self.path, type(module), tuple(given)))
        give_class(module, self.cls)
        for name, value in given.items():
            setattr(module, name, value)

    def problem(self, model: Any) -> str | None:
        """Return what is wrong where this was carried out, or None."""
        module = model.get_submodule(self.path)
        if not isinstance(module, self.cls):
            return f"its class is {type(module).__name__} instead of {self.cls.__name__}"
        positions = getattr(module, NATIVE_POSITIONS, self.native_positions)
        return None if positions == self.native_positions else "its native positions are in force again"


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


@dataclass(frozen=True)
class RemoveRows:
    """Takes away the rows of an embedding that positions inside attention are made from.

    Attributes:
        path: of the embedding.
        native: whether zeros of its shape stand for it in the state dict, so that stock classes run it; otherwise they
            refuse it.
    """

    takes_weights: ClassVar[bool] = True
    path: str
    native: bool

    def apply(self, model: Any, undo: list[Undo]) -> None:
        embedding = model.get_submodule(self.path)
        undo.insert(0, RestoreChild(self.path, embedding))
        weight = embedding.weight
        zeros = weight.new_zeros(weight.shape if self.native else SENTINEL_SHAPE).detach()
        model.set_submodule(self.path, NoRows(zeros, weight.shape[1]))

    def dress(self, model: Any) -> None:
        """Give a natively loaded model, whose rows are zeros that could be trained, rows that stay zeros."""
        self.apply(model, [])

    def problem(self, model: Any) -> str | None:
        """Return what is wrong where this was carried out, or None."""
        held = model.get_submodule(self.path)
        return (
            None
            if isinstance(held, NoRows) and held.is_empty
            else "the rows that native positions are made from are still there"
        )


@dataclass(frozen=True)
class CopyRows:
    """Begins a scheme's learned table with the rows from which the same mechanism was made natively.

    Attributes:
        source: path of the embedding that holds them.
        carried: path of the scheme's mechanism, whose `table` takes them.
    """

    source: str
    carried: str

    def apply(self, model: Any, undo: list[Undo]) -> None:
        rows, table = model.get_submodule(self.source).weight, model.get_submodule(self.carried).table
        if not rows.is_meta and not table.is_meta:
            table.data.copy_(rows.detach())

    def problem(self, model: Any) -> str | None:
        """Return None: the rows may have been trained since."""
        return None


@dataclass
class RestoreSize:
    """Puts a buffer back that was resized."""

    path: str
    buffer: Tensor

    def __call__(self, model: nn.Module) -> None:
        owner, _, leaf = self.path.rpartition(".")
        current = getattr(model.get_submodule(owner), leaf)
        # a model that was built on meta has what it began with in what it has now
        held = current[tuple(map(slice, self.buffer.shape))] if self.buffer.is_meta else self.buffer.to(current.device)
        setattr(model.get_submodule(owner), leaf, held)


@dataclass(frozen=True)
class Resize:
    """Gives a buffer that is read no more the shape that a fresh model of the new length has, and zeros.

    transformers fills it whenever it loads the model, by the length in the config.
    """

    path: str
    shape: tuple[int, ...]

    def apply(self, model: Any, undo: list[Undo]) -> None:
        owner, _, leaf = self.path.rpartition(".")
        old = getattr(model.get_submodule(owner), leaf)
        undo.insert(0, RestoreSize(self.path, old))
        setattr(model.get_submodule(owner), leaf, old.new_zeros(self.shape))

    def problem(self, model: Any) -> str | None:
        """Return what is wrong where this was carried out, or None."""
        owner, _, leaf = self.path.rpartition(".")
        shape = tuple(getattr(model.get_submodule(owner), leaf).shape)
        return None if shape == self.shape else f"it has shape {list(shape)} instead of {list(self.shape)}"
