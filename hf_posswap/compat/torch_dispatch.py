"""What torch runs beneath its functions, seen call by call: the operators, and the memory of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from hf_posswap.utils.threads import shared


class Watch(TorchDispatchMode):
    """A context in which `call` runs each operator, on plain and fake tensors: sharded ones come as their own parts.

    Touches `TorchDispatchMode` (torch 2.6 to 2.13), which no page of torch promises. Without it neither the memory nor
    the work of a step can be counted.
    """

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the operator `func` gives for these arguments.

        Touches `TorchDispatchMode.__torch_dispatch__`, which calls it. Without it subclasses would have to.
        """
        return func(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(_is_sharded(tensor_type) for tensor_type in types):  # DTensor then runs operators on its shards
            return NotImplemented
        if func is torch.ops.prim.device.default:  # fake tensors call it all the time
            return args[0].device
        return self.call(func, args, kwargs or {})


def _is_sharded(tensor_type: type) -> bool:
    return tensor_type.__name__ == "DTensor" and tensor_type.__module__.startswith("torch.distributed")


def tensors_in(*values: Any) -> list[Tensor]:
    """Return the tensors in `values`, in lists and mappings too.

    Touches `torch.utils._pytree.tree_leaves` (torch 2.6 to 2.13). Without it the arguments of operators on lists of
    tensors, such as a fused optimizer's, would not be seen.
    """
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def reads_number(operator: Any) -> bool:
    """Return whether `operator` gives Python the one number of a tensor, as `Tensor.item` and `bool(tensor)` do.

    Touches `torch.ops.aten._local_scalar_dense` (torch 2.6 to 2.13). Without it the places where a step waits for a
    number could not be found.
    """
    return operator is torch.ops.aten._local_scalar_dense.default


def argument_names(operator: Any) -> list[str]:
    """Return the names of the arguments of `operator`, in their order.

    Touches `OpOverload._schema` (torch 2.6 to 2.13). Without it fused attention could not be asked for its shapes.
    """
    return [argument.name for argument in operator._schema.arguments]


def writes(operator: Any) -> bool:
    """Return whether `operator` writes into its arguments.

    Touches the same. Without it what works in place cannot be told from what only looks at memory in another way.
    """
    return bool(operator._schema.is_mutable)


def storage_key(storage: Any) -> int:
    """Return what tells an untyped `storage` from all others that are in use.

    Touches `UntypedStorage._cdata` (torch 2.6 to 2.13). Without it views would be counted as memory of their own.
    """
    return int(storage._cdata)


def without_modes() -> AbstractContextManager[Any]:
    """Return a context in which operators run as they are, whatever watches them or makes them fake around it.

    Touches `torch.utils._python_dispatch._disable_current_modes` (torch 2.6 to 2.13). Without it a kernel that is tried
    under a fake mode would be found wrong, for the rest of the process.
    """
    return _disable_current_modes()


_told_of_sizes: ContextVar[tuple[Callable[[Any], None], ...]] = ContextVar("told_of_sizes", default=())


@contextmanager
def resized_storages(tell: Callable[[Any], None]) -> Iterator[None]:
    """Have `tell` called with each storage whose size this thread changes in the block: FSDP2 empties its own so.

    Touches `UntypedStorage.resize_` (torch 2.6 to 2.13), which is called past the dispatcher. Without it weights that
    FSDP2 has gathered once would count for ever.
    """

    def _begin() -> Callable[[], None]:
        original = torch.UntypedStorage.resize_

        def _resize(storage: Any, size: int) -> Any:
            result = original(storage, size)
            for each in _told_of_sizes.get():
                each(storage)
            return result

        def _end() -> None:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]

        torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign, assignment]
        return _end

    with shared("UntypedStorage.resize_", _begin):
        before = _told_of_sizes.set((*_told_of_sizes.get(), tell))
        try:
            yield
        finally:
            _told_of_sizes.reset(before)
