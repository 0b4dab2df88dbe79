"""Proof, on the model itself, that a packing does what it says."""

from __future__ import annotations

from typing import Any

from hf_posswap.training.data.build import TokenData


def prove_packing(model: Any, data: TokenData) -> None:
    """Check on one batch that attention crosses what it should and nothing else, and that positions are in force.

    Changes a token and looks which logits change. Call it once before a run, with the swapped model on its device.

    Args:
        model: that is to be trained.
        data: what it is to be trained on.

    Raises:
        DataError: documents leak into one another, pieces do not see one another, or given positions have no effect.
    """
    raise NotImplementedError
