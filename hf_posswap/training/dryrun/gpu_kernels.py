"""What a GPU takes for fake tensors on the CPU: its attention, its autocast, and this package's ways for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from hf_posswap.compat.torch_autocast import gpu_autocast
from hf_posswap.compat.torch_kernels import efficient_attention, fused_attention
from hf_posswap.utils.devices import standing_for

_HALF = (torch.bfloat16, torch.float16)
_WIDEST = 256  # dimensions of a head that the flash kernel takes


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Have fake tensors take, in the block, what they would take on a GPU."""
    with ExitStack() as stack:
        for context in (standing_for("cuda"), gpu_autocast(), _gpu_attention()):
            stack.enter_context(context)
        yield


@contextmanager
def _gpu_attention() -> Iterator[None]:
    """Have torch's attention take the kernels of a GPU: the CPU's own would hold all scores under dropout."""
    original = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = _attention  # a mode of torch would rest while layers are run again
    try:
        yield
    finally:
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
        query, key, value = (one.to(dtype) for one in (query, key, value))
        attn_mask = attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask.to(dtype)
    if query.dtype in _HALF and attn_mask is None and query.shape[-1] <= _WIDEST:
        flash = fused_attention("cuda")
        found: Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return found
    if enable_gqa:  # which the other kernel does not know
        key, value = (one.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for one in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    wants = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
    other: Tensor = efficient_attention()(query, key, value, attn_mask, wants, dropout_p, is_causal, scale=scale)[0]
    return other
