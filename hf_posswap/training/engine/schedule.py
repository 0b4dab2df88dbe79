"""The learning rate of each step, and the share of a new mechanism."""

from __future__ import annotations

import math

from hf_posswap.training.config import OptimizerSettings


def rate_share(step: int, settings: OptimizerSettings) -> float:
    """Return the learning rate of `step`, counted from 0, as a share of the recipe's.

    Example:
        >>> settings = OptimizerSettings(steps=10, warmup=2, final_rate=0.5, schedule="linear")
        >>> [round(rate_share(step, settings), 3) for step in (0, 1, 2, 6, 9)]
        [0.5, 1.0, 1.0, 0.714, 0.5]
    """
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    if settings.schedule == "constant":
        return 1.0
    done = min(1.0, (step - settings.warmup) / max(1, settings.steps - 1 - settings.warmup))
    left = 1 - done if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return settings.final_rate + (1 - settings.final_rate) * left


def blend_share(step: int, steps: int) -> float:
    """Return the share of the new mechanism at `step`, counted from 0, of a swap spread over `steps`.

    Example:
        >>> [blend_share(step, 4) for step in (0, 1, 3, 9)]
        [0.25, 0.5, 1.0, 1.0]
    """
    return min(1.0, (step + 1) / steps)
