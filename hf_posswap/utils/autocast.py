"""What mixed precision makes of the tensors that enter an attention, where torch's own attention is not asked.

`torch.autocast` narrows queries, keys and values in the calls that it knows, and rotations widen queries and keys: a
model may pass float32 queries with bfloat16 values.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

WITHOUT = ("meta", "lazy", "vulkan")
"""Types of devices that torch has no autocast of, and raises for; `torch.compile` of torch 2.6 cannot ask which."""


def attended_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which `scaled_dot_product_attention` would take `tensor` now.

    Example:
        >>> query = torch.ones(1)
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     attended_dtype(query)
        torch.bfloat16
        >>> attended_dtype(query)
        torch.float32
    """
    device = tensor.device.type
    if device in WITHOUT or tensor.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return tensor.dtype
    return torch.get_autocast_dtype(device)


def as_attended(tensor: Tensor) -> Tensor:
    """Return `tensor` as `scaled_dot_product_attention` would take it now."""
    dtype = attended_dtype(tensor)
    return tensor if tensor.dtype == dtype else tensor.to(dtype)  # in decoding a call of torch's in vain is seen


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which no operator narrows its inputs on the device of `tensor`."""
    device = tensor.device.type
    return nullcontext() if device in WITHOUT else torch.autocast(device, enabled=False)
