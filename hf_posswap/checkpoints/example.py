"""The small GPT-2 that comes with the package, for trying things out offline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hf_posswap.checkpoints.load import load

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXAMPLE = Path(__file__).resolve().parents[1] / "quickstart" / "model"
"""Its folder; the README there says how it was trained."""


def load_example() -> PreTrainedModel:
    """Load a GPT-2 of 0.9 million parameters and 128 learned positions, trained on Python's source code.

    It is part of the package, so nothing is downloaded. Its tokenizer is in the folder `model.name_or_path`.

    Returns:
        A stock `GPT2LMHeadModel` in eval mode on the CPU, in float32.

    Example:
        >>> from hf_posswap import load_example
        >>> model = load_example()
        >>> type(model).__name__, model.config.max_position_embeddings
        ('GPT2LMHeadModel', 128)
    """
    import torch

    return load(EXAMPLE, dtype=torch.float32).eval()
