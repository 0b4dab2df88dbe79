"""Autocast as a GPU has it, for tensors on a CPU: there fewer operators widen to float32."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

WIDENED = (
    "cosine_similarity", "cumprod", "cumsum", "exp", "expm1", "group_norm", "layer_norm", "linalg_vector_norm", "log",
    "log10", "log1p", "log2", "log_softmax.int", "logsumexp", "native_layer_norm", "norm.Scalar", "norm.ScalarOpt_dim",
    "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "reciprocal", "rsqrt", "sinh", "softmax.int", "softplus",
    "sum", "sum.dim_IntList", "tan",
)  # fmt: skip
"""Operators that compute in float32 under autocast on a GPU, and in the dtype that they are given on a CPU."""
_HALF = (torch.bfloat16, torch.float16)


@contextmanager
def gpu_autocast() -> Iterator[None]:
    """Make autocast on a CPU use float32 in the block, in this thread, for the operators for which it does on a GPU.

    Touches `torch.library.Library` under the key AutocastCPU, and `torch._C._ExcludeDispatchKeyGuard` (torch 2.6 to
    2.13). Without it a GELU or a norm in mixed precision would seem to use half of the memory that it uses on a GPU.
    """
    library, thread = torch.library.Library("aten", "IMPL"), threading.get_ident()
    for name in WIDENED:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, _widening(operator, thread), "AutocastCPU")
    try:
        yield
    finally:
        library._destroy()


def _widening(operator: Any, thread: int) -> Callable[..., Any]:
    beneath = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def _widened(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(beneath):
            here = threading.get_ident() == thread
            if here and not any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
                args, kwargs = tree_map_only(Tensor, _float32, (args, kwargs))
            return operator(*args, **kwargs)

    return _widened


def _float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor
