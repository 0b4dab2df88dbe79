"""Makes fake tensors on the CPU use a GPU's attention kernels, its autocast and this package's GPU backends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_posswap.compat.torch_autocast import gpu_autocast
from hf_posswap.compat.torch_kernels import efficient_attention, fused_attention
from hf_posswap.utils.devices import standing_for

_HALF = (torch.bfloat16, torch.float16)
_WIDEST = 256  # largest head dimension of the flash kernel


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Make fake tensors use, within the block, what they would use on a GPU."""
    with ExitStack() as stack:
        for context in (standing_for("cuda"), gpu_autocast(), _gpu_attention()):
            stack.enter_context(context)
        yield


@contextmanager
def _gpu_attention() -> Iterator[None]:
    """Replace torch's attention by the GPU's kernels: the CPU's would materialize all scores under dropout."""
    original, thread = functional.scaled_dot_product_attention, threading.get_ident()

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        here = threading.get_ident() == thread  # other threads run models that hold numbers
        return _attention(*args, **kwargs) if here else original(*args, **kwargs)

    functional.scaled_dot_product_attention = attend  # a dispatch mode is off while layers are recomputed
    try:
        yield
    finally:
        if functional.scaled_dot_product_attention is attend:
            functional.scaled_dot_product_attention = original


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the attention of `query` [B, H, Q, D] to `key` and `value`, [B, H or G, K, D]."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        attn_mask = attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask.to(dtype)
    if query.dtype in _HALF and attn_mask is None and query.shape[-1] <= _WIDEST:
        flash = fused_attention("cuda")
        flash_output: Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return flash_output
    if enable_gqa:  # not supported by the other kernel
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    efficient_output: Tensor = efficient_attention()(
        query, key, value, attn_mask, needs_grad, dropout_p, is_causal, scale=scale
    )[0]
    return efficient_output
