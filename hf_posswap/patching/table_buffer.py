"""Taking away a position table that is a plain buffer, and putting it back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from hf_posswap.patching.actions import Undo
from hf_posswap.patching.embedding import SENTINEL_SHAPE, NoPositions


class NoRows(NoPositions):
    """Stands where a plain buffer [P, E] was from which a model takes rows, and adds nothing.

    Args:
        weight: one lone zero, [1].
    """

    _is_hf_initialized = True  # otherwise transformers fills it, as the buffer that its class has there

    def __getitem__(self, _: Any) -> Tensor:
        return self.forward()


@dataclass
class RestoreTableBuffer:
    """Puts the buffer back, where the model has moved meanwhile and cast as it was."""

    path: str
    buffer: Tensor

    def __call__(self, model: nn.Module) -> None:
        owner, leaf = _owner(model, self.path)
        zero: Any = owner._modules.pop(leaf)
        buffer = self.buffer if zero.weight.is_meta else self.buffer.to(zero.weight)  # device and dtype
        owner.register_buffer(leaf, buffer, persistent=False)


@dataclass(frozen=True)
class RemoveTableBuffer:
    """Takes a table away that is a buffer which no checkpoint holds."""

    takes_weights: ClassVar[bool] = False
    path: str

    def apply(self, model: Any, undo: list[Undo]) -> None:
        owner, leaf = _owner(model, self.path)
        buffer = owner._buffers.pop(leaf)
        undo.insert(0, RestoreTableBuffer(self.path, buffer))
        owner._non_persistent_buffers_set.discard(leaf)
        owner.add_module(leaf, NoRows(buffer.new_zeros(SENTINEL_SHAPE), saved=False))

    def problem(self, model: Any) -> str | None:
        """Return what is wrong where this was carried out, or None."""
        owner, leaf = _owner(model, self.path)
        return None if isinstance(owner._modules.get(leaf), NoRows) else "the position table is still there"


def _owner(model: Any, path: str) -> tuple[Any, str]:
    owner, _, leaf = path.rpartition(".")
    return model.get_submodule(owner), leaf
