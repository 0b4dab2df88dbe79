"""A step on fake tensors: weights and all that depends on them are fake; tokens and what depends only on them is real.

Positions and masks therefore have their real values, and code that branches on them takes the real branch, while large
tensors take no memory or time. On the CPU they use a GPU's attention kernels, its autocast and this package's GPU
backends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_posswap.compat.torch_dispatch import (
    Watch,
    efficient_attention,
    fused_attention,
    gpu_autocast,
    reads_number,
    tensors_in,
    writes,
)
from hf_posswap.compat.torch_tensors import is_fake, needs_values
from hf_posswap.errors import UnsupportedModelError
from hf_posswap.utils.devices import standing_for

if TYPE_CHECKING:
    from hf_posswap.compat.torch_dispatch import Operator

_HALF = (torch.bfloat16, torch.float16)
_WIDEST = 256  # largest head dimension of the flash kernel
aten = torch.ops.aten
_UNFILLED = (aten.empty.memory_format, aten.empty_strided.default)
_INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
_LARGE = 1 << 28  # bytes: larger tensors are always fake


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


class FakeStep(Watch):
    """Keeps the values of small tensors that do not depend on weights; all others are fake.

    Args:
        mode: of the fake weights.
    """

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode = mode
        self._in_step = False

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Refuse, within the block, to read a value of a fake tensor; outside, such a value is 0."""
        previous, self._in_step = self._in_step, True
        try:
            yield
        finally:
            self._in_step = previous

    def call(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        fake = any(map(is_fake, tensors_in(args, kwargs)))
        if fake and reads_number(func):
            tensor = args[0]
            if self._in_step:
                raise UnsupportedModelError(
                    "a dry run has no weights, and the step reads a value computed from them: this model, scheme or "
                    "objective cannot be dry-run. Use the estimate that posswap train prints before its first step."
                )
            return False if tensor.dtype == torch.bool else 0.0 if tensor.is_floating_point() else 0
        if fake and func in _INDEXED:
            # real masks become the indices that they select
            expanded: list[Tensor | None] = []
            for index in args[1]:
                is_real_mask = index is not None and index.dtype == torch.bool and not is_fake(index)
                expanded += index.nonzero(as_tuple=True) if index is not None and is_real_mask else [index]
            args = (args[0], expanded, *args[2:])
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        is_unfilled = func in _UNFILLED and dtype.is_floating_point
        if fake or is_unfilled or self._is_large(func, args, kwargs):
            with self.mode:
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _is_large(self, func: Operator, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
        if writes(func) or needs_values(func):
            return False
        with self.mode:
            outputs = tensors_in(func(*args, **kwargs))
        return any(tensor.untyped_storage().nbytes() > _LARGE for tensor in outputs)
