"""A step without numbers: weights and all that comes of them are fake, tokens and what comes of them alone are real.

So positions and masks hold what they hold in a real step, and code that asks them goes the same way as there; nothing
that is large takes memory or time.
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
_LARGE = 1 << 28  # bytes: what is larger is fake, whatever it comes of


class Unreal(Watch):
    """Keeps the numbers of small tensors that no weight has a part in; all others are fake.

    Args:
        mode: of the fake weights.
    """

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode = mode
        self._in_step = False

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Refuse, in the block, that a number is asked of a fake tensor; outside such a number is 0."""
        before, self._in_step = self._in_step, True
        try:
            yield
        finally:
            self._in_step = before

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fake = any(map(is_fake, tensors_in(args, kwargs)))
        if fake and reads_number(func):
            return self._number(args[0])
        if fake and func in _INDEXED:
            args = (args[0], _by_numbers(args[1]), *args[2:])
        if fake or self._is_unfilled(func, kwargs) or self._is_large(func, args, kwargs):
            with self.mode:
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _number(self, tensor: Tensor) -> bool | int | float:
        if self._in_step:
            raise UnsupportedModelError(
                "a dry run has no numbers, and the step asks for one that comes of the weights: this model, scheme or "
                "objective cannot be dry-run. The estimate that posswap train prints before its first step stands in."
            )
        return False if tensor.dtype == torch.bool else 0.0 if tensor.is_floating_point() else 0

    def _is_unfilled(self, func: Any, kwargs: dict[str, Any]) -> bool:
        kind = kwargs.get("dtype") or torch.get_default_dtype()
        return func in _UNFILLED and kind.is_floating_point

    def _is_large(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if writes(func) or needs_values(func):
            return False
        with self.mode:
            made = tensors_in(func(*args, **kwargs))
        return any(one.untyped_storage().nbytes() > _LARGE for one in made)


def _by_numbers(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Return `indices` with the numbers of what masks choose in place of masks whose values are known."""
    found: list[Tensor | None] = []
    for one in indices:
        known = one is not None and one.dtype == torch.bool and not is_fake(one)
        found += one.nonzero(as_tuple=True) if one is not None and known else [one]
    return found
