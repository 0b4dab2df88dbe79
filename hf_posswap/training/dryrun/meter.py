"""Measures a step: the memory of every tensor, and the work of every operator.

Work is FLOPs, bytes of memory traffic, and bytes sent to other processes.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from hf_posswap.compat.torch_dispatch import (
    Watch,
    argument_names,
    fused_attention,
    fused_attention_backward,
    storage_key,
    tensors_in,
    writes,
)
from hf_posswap.compat.torch_processes import is_collective
from hf_posswap.compat.torch_tensors import is_nested

if TYPE_CHECKING:
    from hf_posswap.compat.torch_dispatch import Operator

aten = torch.ops.aten
_ROWS = (aten.embedding, aten.index, aten.gather, aten.index_select)
"""Operators that read only as many bytes of their table as they return."""
ALL_REDUCE = 2
"""Passes of a ring all-reduce; a gather or scatter has one."""
Kinds = Callable[[], dict[int, str]]
"""Returns the kind of memory by storage key; keys without one are activations."""
OTHERS = "activations"


@dataclass
class Work:
    """The total work of operators.

    Attributes:
        items: counts of operators by (dtype, FLOPs, bytes moved).
        sent: bytes sent to other processes.
    """

    items: Counter[tuple[torch.dtype | None, int, int]] = field(default_factory=Counter)
    sent: int = 0

    def __iadd__(self, other: Work) -> Work:
        self.items.update(other.items)
        self.sent += other.sent
        return self

    def copy(self) -> Work:
        """Return an independent copy."""
        return Work(Counter(self.items), self.sent)

    def since(self, before: Work) -> Work:
        """Return the work done since `before`, an earlier copy of this one."""
        return Work(self.items - before.items, self.sent - before.sent)

    def times(self, count: int) -> Work:
        """Return `count` times this work."""
        return Work(Counter({item: count * number for item, number in self.items.items()}), count * self.sent)

    @property
    def flops(self) -> int:
        """Total FLOPs."""
        return sum(flops * count for (_, flops, _), count in self.items.items())

    @property
    def moved(self) -> int:
        """Total bytes that operators read and write."""
        return sum(moved * count for (_, _, moved), count in self.items.items())


def work_of(
    func: Any,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    inputs: list[Tensor],
    outputs: list[Tensor],
    result: object,
) -> Work:
    """Return the work of the operator `func`.

    Args:
        func: an operator overload.
        args: its positional arguments.
        kwargs: its keyword arguments.
        inputs: the tensors in both.
        outputs: the tensors in `result`.
        result: its return value.
    """
    if is_collective(func):
        name = func.overloadpacket.__name__.replace("_", "")
        passes = ALL_REDUCE if "allreduce" in name else int("gather" in name or "scatter" in name)
        return Work(sent=ring_bytes(passes, max(map(_bytes, (*inputs, *outputs)), default=0)))
    moved = _moved(func, inputs, outputs)
    flops = _flops(func, args, kwargs, result)
    if not moved and not flops:
        return Work()
    dtypes = [tensor.dtype for tensor in inputs if tensor.is_floating_point()]
    return Work(Counter({(dtypes[0] if flops and dtypes else None, flops, moved): 1}))


def _moved(func: Operator, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Return the bytes read and written; 0 for a view."""
    input_keys = set(map(_storage_key, inputs))
    if not writes(func) and all(_storage_key(tensor) in input_keys for tensor in outputs):
        return 0
    if func.overloadpacket in _ROWS:
        return 2 * sum(map(_bytes, outputs))
    read_bytes = {(_storage_key(tensor), tensor.storage_offset(), tensor.shape): _bytes(tensor) for tensor in inputs}
    written_tensors = outputs or inputs  # a fused optimizer returns nothing
    return sum(read_bytes.values()) + sum(map(_bytes, written_tensors))


def _storage_key(tensor: Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _flops(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> int:
    count = _ATTENTION_FLOPS.get(func.overloadpacket, flop_registry.get(func.overloadpacket))
    if count is None:
        return 0
    arguments = dict(zip(argument_names(func), args, strict=False)) | kwargs
    full = int(count(*args, **kwargs, out_val=result))
    causal = arguments.get("is_causal") and arguments["query"].shape[-2] == arguments["key"].shape[-2]
    return full // 2 if causal else full  # causal attention needs half of the scores


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    return int(sdpa_flop_count(query.shape, _expanded_shape(query, key), _expanded_shape(query, value)))


def _attention_backward_flops(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
) -> int:
    shapes = (query.shape, _expanded_shape(query, key), _expanded_shape(query, value))
    return int(sdpa_backward_flop_count(gradient.shape, *shapes))


def _expanded_shape(query: Tensor, grouped: Tensor) -> tuple[int, ...]:
    """Return the shape of `grouped`, [B, G, K, D], expanded to the heads of `query`, [B, H, Q, D]."""
    batch, _, length, dim = grouped.shape
    return batch, query.shape[1], length, dim


_ATTENTION_FLOPS = {fused_attention(device): _attention_flops for device in ("cpu", "cuda")} | {
    fused_attention_backward(device): _attention_backward_flops for device in ("cpu", "cuda")
}
"""FLOP formulas that torch lacks: attention on a CPU, and (torch 2.6) with grouped keys."""


def ring_bytes(passes: int, size: int) -> int:
    """Return the bytes that a process sends in `passes` ring passes over a tensor of `size` bytes."""
    count = dist.get_world_size()
    return passes * size * (count - 1) // count


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

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage was resized."""
        key = storage_key(storage)
        if key in self._sizes:
            self._count(key, storage.nbytes())

    def call(self, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
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
