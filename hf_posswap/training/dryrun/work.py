"""The work of one operator: operations, bytes that it moves, and bytes that it sends to other processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from hf_posswap.compat.torch_dispatch import argument_names, storage_key, writes
from hf_posswap.compat.torch_kernels import fused_attention, fused_attention_backward
from hf_posswap.compat.torch_processes import is_collective

aten = torch.ops.aten
_ROWS = (aten.embedding, aten.index, aten.gather, aten.index_select)
"""Read as many bytes of their table as they give."""
ALL_REDUCE = 2
"""How often it sends what it adds up, by a ring; a gather or scatter once."""


@dataclass
class Work:
    """What operators do.

    Attributes:
        items: (dtype of the operations, operations, bytes moved) of operators that do as much each, and how many.
        sent: bytes to other processes.
    """

    items: Counter[tuple[torch.dtype | None, int, int]] = field(default_factory=Counter)
    sent: int = 0

    def __iadd__(self, other: Work) -> Work:
        self.items.update(other.items)
        self.sent += other.sent
        return self

    def copy(self) -> Work:
        """Return the same, that does not change with it."""
        return Work(Counter(self.items), self.sent)

    def since(self, before: Work) -> Work:
        """Return what was done after `before`, a copy of this one then."""
        return Work(self.items - before.items, self.sent - before.sent)

    def times(self, count: int) -> Work:
        """Return `count` times as much."""
        return Work(Counter({item: count * held for item, held in self.items.items()}), count * self.sent)

    @property
    def flops(self) -> int:
        """All operations."""
        return sum(flops * count for (_, flops, _), count in self.items.items())

    @property
    def moved(self) -> int:
        """All bytes that operators read and write."""
        return sum(moved * count for (_, _, moved), count in self.items.items())


def work_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], made: list[Tensor], found: Any
) -> Work:
    """Return the work of the operator `func`.

    Args:
        func: an overload.
        args: of it.
        kwargs: of it.
        given: the tensors in both.
        made: the tensors that it gave.
        found: what it gave.
    """
    if is_collective(func):
        return Work(sent=_sent(func, given, made))
    moved = _moved(func, given, made)
    flops = _flops(func, args, kwargs, found)
    if not moved and not flops:
        return Work()
    kinds = [tensor.dtype for tensor in given if tensor.is_floating_point()]
    return Work(Counter({(kinds[0] if flops and kinds else None, flops, moved): 1}))


def _moved(func: Any, given: list[Tensor], made: list[Tensor]) -> int:
    """Return the bytes of all that is read and written; 0 of what only looks at memory in another way."""
    held = set(map(_key, given))
    if not writes(func) and all(_key(tensor) in held for tensor in made):
        return 0
    if func.overloadpacket in _ROWS:
        return 2 * sum(map(_bytes, made))
    read = {(_key(tensor), tensor.storage_offset(), tensor.shape): _bytes(tensor) for tensor in given}
    written = made or given  # a fused optimizer gives nothing back
    return sum(read.values()) + sum(map(_bytes, written))


def _key(tensor: Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> int:
    count: Any = _OF_ATTENTION.get(func.overloadpacket, flop_registry.get(func.overloadpacket))
    if count is None:
        return 0
    said = dict(zip(argument_names(func), args, strict=False)) | kwargs
    whole = int(count(*args, **kwargs, out_val=found))
    causal = said.get("is_causal") and said["query"].shape[-2] == said["key"].shape[-2]
    return whole // 2 if causal else whole  # of causal scores half are needed


def _forward(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, _for_each(query, key), _for_each(query, value)))


def _backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    shapes = (query.shape, _for_each(query, key), _for_each(query, value))
    return int(sdpa_backward_flop_count(gradient.shape, *shapes))


def _for_each(query: Tensor, grouped: Tensor) -> tuple[int, ...]:
    """Return the shape of `grouped`, [B, G, K, D], with a head for each of `query`, [B, H, Q, D]."""
    batch, _, length, dim = grouped.shape
    return batch, query.shape[1], length, dim


_OF_ATTENTION = {fused_attention(device): _forward for device in ("cpu", "cuda")} | {
    fused_attention_backward(device): _backward for device in ("cpu", "cuda")
}
"""What torch has no formula for: on a CPU, and (torch 2.6) with fewer heads of keys than of queries."""


def _sent(func: Any, given: list[Tensor], made: list[Tensor]) -> int:
    name = func.overloadpacket.__name__.replace("_", "")
    often = ALL_REDUCE if "allreduce" in name else int("gather" in name or "scatter" in name)
    return ring_bytes(often, max(map(_bytes, (*given, *made)), default=0))


def ring_bytes(often: int, whole: int) -> int:
    """Return what a process sends of a tensor of `whole` bytes, all but its own share of it, `often` times."""
    count = dist.get_world_size()
    return often * whole * (count - 1) // count
