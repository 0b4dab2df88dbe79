"""Measures a step: the memory of every tensor, and the work of every operator."""

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
"""Returns the kind of memory by storage key; keys without one are activations."""
OTHERS = "activations"


@dataclass
class Memory:
    """Allocated memory.

    Attributes:
        now: bytes allocated.
        peak: most bytes at any time since `begin`.
        at_peak: bytes of each kind at the peak.
    """

    now: int = 0
    peak: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)


class Meter(Watch):
    """Counts, within the block, the memory of all tensors that operators return, and the operators' work.

    Args:
        kinds: called after a peak of memory.
    """

    def __init__(self, kinds: Kinds) -> None:
        super().__init__()
        self.memory, self.work = Memory(), Work()
        self._kinds = kinds
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, Any] = {}
        self._begun = self._is_peak = False

    def begin(self) -> None:
        """Start to look for the peak."""
        self.memory = Memory(self.memory.now, self.memory.now)
        self._begun = self._is_peak = True

    def hold(self, tensors: Any) -> None:
        """Count tensors that were created before the block."""
        for tensor in tensors:
            self._note(tensor)

    def settle(self) -> Memory:
        """Return the peak since `begin`, by kinds, and stop watching tensors."""
        self._record_peak()
        for watch in self._watched.values():
            watch.detach()
        return self.memory

    def resized(self, storage: Any) -> None:
        """Record that a storage was resized."""
        key = storage_key(storage)
        if key in self._sizes:
            self._count(key, storage.nbytes())

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if is_nested():
            return result
        outputs = tensors_in(result)
        for tensor in outputs:
            self._note(tensor)
        inputs = tensors_in(args, kwargs)
        self.work += work_of(func, args, kwargs, inputs, outputs, result)
        return result

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
            self._record_peak()
        self._sizes[key] = size
        self.memory.now += change
        if self.memory.now > self.memory.peak:
            self.memory.peak, self._is_peak = self.memory.now, self._begun

    def _drop(self, key: int) -> None:
        self._count(key, 0)
        del self._sizes[key], self._watched[key]

    def _record_peak(self) -> None:
        """Record the kinds of memory at the peak, before any of it is freed."""
        if not self._is_peak:
            return
        self._is_peak = False
        kind_by_key, sums = self._kinds(), Counter[str]()
        for key, size in self._sizes.items():
            sums[kind_by_key.get(key, OTHERS)] += size
        self.memory.at_peak = dict(sums)
