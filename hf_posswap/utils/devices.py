"""Devices and dtypes as callers give them, and what decides how a model computes: device, mixed precision, eval mode.

Where torch's own attention is not asked, `torch.autocast` narrows queries, keys and values in the calls that it knows,
and rotations widen queries and keys: a model may pass float32 queries with bfloat16 values.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from hf_posswap.errors import OptionError
from hf_posswap.utils.format import said_by
from hf_posswap.utils.printable import brief_repr

_STANDS_FOR: ContextVar[str | None] = ContextVar("stands_for", default=None)
_WITHOUT_AUTOCAST = ("meta", "lazy", "vulkan")
"""Types of devices that torch has no autocast of, and raises for; `torch.compile` of torch 2.6 cannot ask which."""


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


def is_capturing() -> bool:
    """Return whether a CUDA graph takes down what runs, so that no number of the GPU can be read."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextmanager
def standing_for(device: str) -> Iterator[None]:
    """Let all tensors, which are fake, take the ways of computing of a type of `device` in the block."""
    before = _STANDS_FOR.set(device)
    try:
        yield
    finally:
        _STANDS_FOR.reset(before)


@overload
def resolve_device(device: None) -> None: ...


@overload
def resolve_device(device: str | torch.device) -> torch.device: ...


def resolve_device(device: torch.device | str | None) -> torch.device | None:
    """Return the device that a caller gave: a torch.device, its name, or "auto", a GPU if there is one; None stays.

    Raises:
        OptionError: no such device here.

    Example:
        >>> resolve_device("cpu"), resolve_device(None)
        (device(type='cpu'), None)
    """
    if device is None:
        return None
    if isinstance(device, str) and device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.empty(1, device=resolved)
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:  # torch raises any of them, by build
        raise OptionError(
            f"device {brief_repr(device)} cannot be used here ({said_by(error)}): give 'auto' or 'cpu'."
        ) from error
    if resolved.type == "meta":
        raise OptionError("device 'meta' holds no numbers: give 'auto' or 'cpu'.")
    return resolved


def resolve_dtype(dtype: torch.dtype | str | None) -> torch.dtype | str | None:
    """Return the floating-point dtype that a caller gave, a torch.dtype or its name; "auto" and None stay.

    Raises:
        OptionError: no such dtype.

    Example:
        >>> resolve_dtype("bfloat16"), resolve_dtype("auto")
        (torch.bfloat16, 'auto')
    """
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        return dtype
    resolved = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise OptionError(
            f"dtype is a floating-point precision of torch, such as 'float32' or torch.bfloat16, got "
            f"{brief_repr(dtype)}."
        )
    return resolved


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
    if device in _WITHOUT_AUTOCAST or tensor.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return tensor.dtype
    return torch.get_autocast_dtype(device)


def as_attended(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return `tensors`, of one device, as `scaled_dot_product_attention` would take them now."""
    device = tensors[0].device.type
    if device in _WITHOUT_AUTOCAST or not torch.is_autocast_enabled(device):
        return tensors
    # in decoding a call of torch's in vain is seen
    return tuple(x if x.dtype == (dtype := attended_dtype(x)) else x.to(dtype) for x in tensors)


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which no operator narrows its inputs on the device of `tensor`."""
    device = tensor.device.type
    return nullcontext() if device in _WITHOUT_AUTOCAST else torch.autocast(device, enabled=False)


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put `model` in eval mode inside the block, then restore the mode of each module."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def available_bytes(device: torch.device) -> int | None:
    """Return the free memory of `device` in bytes, or None if it is unknown.

    On the CPU it is the smaller of the system's available memory and the rest of the control group's limit, divided by
    the number of processes that a launcher started on this machine.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    known = [value for value in (_meminfo(), _control_group()) if value is not None]
    return min(known) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if known else None


def _meminfo(path: Path = Path("/proc/meminfo")) -> int | None:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(kilobytes[0]) if kilobytes else None


_NO_LIMIT = 1 << 60
_CONTROL_GROUPS = (
    ("", "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")),
    ("memory", "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
)
"""Of versions 2 and 1: the controller in /proc/self/cgroup, the mount, and the files, with the entry of memory.stat."""


def _control_group(root: Path = Path("/")) -> int | None:
    """Return what the limits of this process's control group and of those above it leave of memory; None: no limit.

    Pages of files that are not in use count as free: the kernel takes them back before it refuses memory.
    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files

    Args:
        root: in which proc and sys are.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    paths = {name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")}
    free = []
    for controller, mount, (most, used, inactive) in _CONTROL_GROUPS:
        top = root / mount
        group = top / paths.get(controller, "").lstrip("/")  # in a container perhaps a path of the host
        for folder in (group, *group.parents):
            if folder != top and top not in folder.parents:
                break
            with suppress(OSError, ValueError):  # no such file, or "max": no limit
                limit, current = (int((folder / name).read_text(encoding="ascii")) for name in (most, used))
                stat = folder / "memory.stat"
                text = stat.read_text(encoding="ascii") if stat.is_file() else ""
                cached = int(dict(line.split() for line in text.splitlines()).get(inactive, 0))
                free += [max(0, limit - current + min(cached, current))] if limit < _NO_LIMIT else []
    return min(free, default=None)
