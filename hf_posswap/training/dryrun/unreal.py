"""A step on fake tensors: weights and all that depends on them are fake; tokens and what depends only on them is real.

Positions and masks therefore have their real values, and code that branches on them takes the real branch, while large
tensors take no memory or time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_posswap.compat.torch_dispatch import Watch, reads_number, tensors_in, writes
from hf_posswap.compat.torch_fake import is_fake, needs_values
from hf_posswap.errors import UnsupportedModelError

aten = torch.ops.aten
_UNFILLED = (aten.empty.memory_format, aten.empty_strided.default)
_INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
_LARGE = 1 << 28  # bytes: larger tensors are always fake


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

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fake = any(map(is_fake, tensors_in(args, kwargs)))
        if fake and reads_number(func):
            return self._number(args[0])
        if fake and func in _INDEXED:
            args = (args[0], _masks_as_indices(args[1]), *args[2:])
        if fake or self._is_unfilled(func, kwargs) or self._is_large(func, args, kwargs):
            with self.mode:
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _number(self, tensor: Tensor) -> bool | int | float:
        if self._in_step:
            raise UnsupportedModelError(
                "a dry run has no weights, and the step reads a value computed from them: this model, scheme or "
                "objective cannot be dry-run. Use the estimate that posswap train prints before its first step."
            )
        return False if tensor.dtype == torch.bool else 0.0 if tensor.is_floating_point() else 0

    def _is_unfilled(self, func: Any, kwargs: dict[str, Any]) -> bool:
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return func in _UNFILLED and dtype.is_floating_point

    def _is_large(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if writes(func) or needs_values(func):
            return False
        with self.mode:
            outputs = tensors_in(func(*args, **kwargs))
        return any(tensor.untyped_storage().nbytes() > _LARGE for tensor in outputs)


def _masks_as_indices(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Return `indices` with real masks replaced by the indices that they select."""
    expanded: list[Tensor | None] = []
    for index in indices:
        is_real_mask = index is not None and index.dtype == torch.bool and not is_fake(index)
        expanded += index.nonzero(as_tuple=True) if index is not None and is_real_mask else [index]
    return expanded
