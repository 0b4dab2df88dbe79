"""Self-test of a kernel, once in each process: it may be correct in one PyTorch release and wrong in another."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from hf_posswap.compat.torch_dispatch import without_modes
from hf_posswap.errors import BackendWarning
from hf_posswap.utils.format import said_by

TOLERANCE = {"cpu": 1e-5, "cuda": 5e-2}
"""Maximum difference of a kernel's result from the formula: in float32, and on a GPU in bfloat16."""


def works_correctly(kernel: str, device: str, error: Callable[[str], float]) -> bool:
    """Return whether a kernel works correctly on `device`; warn if not.

    Args:
        kernel: the kernel's name in the warning.
        device: the device type.
        error: runs the kernel on the device, and returns its largest difference from the formula.
    """
    try:
        with without_modes(), torch.autocast(device, enabled=False):  # autocast would reduce the formula's precision
            difference = error(device)
    except Exception as problem:  # any error means that the kernel does not work
        reason = f"{type(problem).__name__}: {said_by(problem)}"
    else:
        if difference <= TOLERANCE[device]:
            return True
        reason = f"its results differ from the formula by {difference:.1e}"
    warnings.warn(
        f"hf_posswap's {kernel} does not work on torch {torch.__version__}, {device} ({reason}). "
        "The plain paths are used instead: the same results, slower and with more memory.",
        BackendWarning,
        stacklevel=3,
    )
    return False
