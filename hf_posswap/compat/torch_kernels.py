"""Operators: those beneath `scaled_dot_product_attention`, which give the logarithms of its sums, and our own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_GROUPS_ON_CPU = torch.__version__ >= "2.13"  # asked once: torch.compile traces no comparison of versions


def fused_attention(device: str) -> Any:
    """Return the operator of fused attention on "cpu" or "cuda".

    Touches `torch.ops.aten._scaled_dot_product_flash_attention`, and `..._for_cpu` (torch 2.6 to 2.13; promised to
    nobody, so `kernels.fused` tries them before it trusts them). Without it the plain paths are taken.
    """
    name = "_scaled_dot_product_flash_attention"
    return getattr(torch.ops.aten, name if device == "cuda" else f"{name}_for_cpu")


def fused_attention_backward(device: str) -> Any:
    """Return the operator of its gradient on "cpu" or "cuda".

    Touches `torch.ops.aten._scaled_dot_product_flash_attention_backward`, and `..._for_cpu_backward` (torch 2.6 to
    2.13). Without it the plain paths are taken.
    """
    name = "_scaled_dot_product_flash_attention"
    return getattr(torch.ops.aten, f"{name}_backward" if device == "cuda" else f"{name}_for_cpu_backward")


def fused_takes_groups(device: str) -> bool:
    """Return whether both operators take fewer heads of keys and values than of queries on "cpu" or "cuda".

    Touches the operators above: on a CPU those of torch 2.13 and 2.15 do, those of 2.6 write beyond the gradients, and
    those between were not run, so they count as 2.6 does. The version tells, since trying it may end the process.
    Without it grouped heads break the memory.
    """
    return device == "cuda" or _GROUPS_ON_CPU


def efficient_attention() -> Any:
    """Return the operator of memory-efficient attention on a GPU, for float32 and for masks.

    Touches `torch.ops.aten._scaled_dot_product_efficient_attention` (torch 2.6 to 2.13). Without it a dry run would
    hold scores that no GPU holds.
    """
    return torch.ops.aten._scaled_dot_product_efficient_attention


@contextmanager
def with_autograd() -> Iterator[None]:
    """Let autograd record in the block, which runs in an operator's kernel: such run where it does not any more.

    Touches `torch._C._ForceDispatchKeyGuard` and the sets of dispatch keys that it takes (torch 2.6 to 2.15). Without
    it an operator could not take its gradients from autograd.
    """
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield
