"""Trying a kernel once in each process before it is trusted: what is right on one PyTorch may be wrong on another."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from hf_posswap.compat.torch_dispatch import without_modes
from hf_posswap.errors import BackendWarning
from hf_posswap.utils.format import said_by

TOLERANCE = {"cpu": 1e-5, "cuda": 5e-2}
"""How far a kernel's result may lie from the formula: in float32, and on a GPU in bfloat16."""


def right(what: str, device: str, error: Callable[[str], float]) -> bool:
    """Return whether a kernel works on `device`, and is right; warn where not.

    Args:
        what: the kernel's name in the warning.
        device: type of device.
        error: runs the kernel there, and returns its largest difference from the formula.
    """
    try:
        with without_modes(), torch.autocast(device, enabled=False):  # which would narrow the formula
            far = error(device)
    except Exception as problem:  # whatever an unknown PyTorch raises here, it means no
        reason = f"{type(problem).__name__}: {said_by(problem)}"
    else:
        if far <= TOLERANCE[device]:
            return True
        reason = f"its results differ from the formula by {far:.1e}"
    warnings.warn(
        f"hf_posswap's {what} does not work on torch {torch.__version__}, {device} ({reason}). "
        "The plain paths are used instead: the same results, slower and with more memory.",
        BackendWarning,
        stacklevel=3,
    )
    return False
