"""The device whose ways of computing a tensor takes: its own, or another one that it stands for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_STANDS_FOR: ContextVar[str | None] = ContextVar("stands_for", default=None)


def device_type(tensor: Tensor) -> str:
    """Return the type of the device that `tensor` is on or, in `standing_for`, stands for.

    Example:
        >>> import torch
        >>> with standing_for("cuda"):
        ...     device_type(torch.ones(1, device="cpu"))
        'cuda'
    """
    return _STANDS_FOR.get() or tensor.device.type


def is_standing_for() -> bool:
    """Return whether tensors stand for those of another device: its kernels are not here to be tried."""
    return _STANDS_FOR.get() is not None


@contextmanager
def standing_for(device: str) -> Iterator[None]:
    """Let all tensors, which are fake, take the ways of computing of a type of `device` in the block."""
    before = _STANDS_FOR.set(device)
    try:
        yield
    finally:
        _STANDS_FOR.reset(before)
