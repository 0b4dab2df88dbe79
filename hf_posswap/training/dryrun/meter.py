"""What a step holds and does: the memory of every tensor, and the work of every operator."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hf_posswap.compat.torch_dispatch import Watch, storage_key, tensors_in
from hf_posswap.compat.torch_fake import is_nested
from hf_posswap.training.dryrun.work import Work, work_of

Kinds = Callable[[], dict[int, str]]
"""Says of what kind memory is, by its key; what it does not name are activations."""
OTHERS = "activations"


@dataclass
class Memory:
    """What is held.

    Attributes:
        now: bytes.
        peak: most bytes at any time since `begin`.
        at_peak: bytes of each kind then.
    """

    now: int = 0
    peak: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)


class Meter(Watch):
    """Counts, in the block, the memory of all tensors that operators give, and the work of the operators.

    Args:
        kinds: asked when memory has been at its peak.
    """

    def __init__(self, kinds: Kinds) -> None:
        super().__init__()
        self.memory, self.work = Memory(), Work()
        self._kinds = kinds
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, Any] = {}
        self._begun = self._is_peak = False

    def begin(self) -> None:
        """Look for a peak from now on."""
        self.memory = Memory(self.memory.now, self.memory.now)
        self._begun = self._is_peak = True

    def hold(self, tensors: Any) -> None:
        """Count tensors that were made before the block."""
        for tensor in tensors:
            self._note(tensor)

    def settle(self) -> Memory:
        """Return what was held at most since `begin`, by kinds, and watch no tensor any longer."""
        self._look()
        for watch in self._watched.values():
            watch.detach()
        return self.memory

    def resized(self, storage: Any) -> None:
        """Take note of a storage that was emptied or filled."""
        key = storage_key(storage)
        if key in self._sizes:
            self._count(key, storage.nbytes())

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = func(*args, **kwargs)
        if is_nested():
            return found
        made = tensors_in(found)
        for tensor in made:
            self._note(tensor)
        given = tensors_in(args, kwargs)
        self.work += work_of(func, args, kwargs, given, made, found)
        return found

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key not in self._sizes:
            self._sizes[key] = 0
            self._watched[key] = weakref.finalize(storage, self._drop, key)
        self._count(key, storage.nbytes())

    def _count(self, key: int, size: int) -> None:
        change = size - self._sizes[key]
        if change < 0:
            self._look()
        self._sizes[key] = size
        self.memory.now += change
        if self.memory.now > self.memory.peak:
            self.memory.peak, self._is_peak = self.memory.now, self._begun

    def _drop(self, key: int) -> None:
        self._count(key, 0)
        del self._sizes[key], self._watched[key]

    def _look(self) -> None:
        """Say of what kind what is held at the peak is, before any of it goes."""
        if not self._is_peak:
            return
        self._is_peak = False
        kinds, sums = self._kinds(), Counter[str]()
        for key, size in self._sizes.items():
            sums[kinds.get(key, OTHERS)] += size
        self.memory.at_peak = dict(sums)
