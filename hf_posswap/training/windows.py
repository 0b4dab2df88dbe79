"""Batches of token windows that depend on the seed and the step alone, so that training can go on where it stopped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_posswap.errors import DataError


@dataclass(frozen=True)
class Windows:
    """Random windows of a token stream.

    Attributes:
        tokens: the stream, integers [N]: whole documents one after another, an end of text before each.
        length: tokens of a window.
        batch: windows of a step.
        seed: of the choice of windows.

    Raises:
        DataError: the stream is shorter than one window, or a size is not positive.

    Example:
        >>> windows = Windows(np.arange(100), length=8, batch=2, seed=0)
        >>> windows.at(3).shape, bool((windows.at(3) == windows.at(3)).all())
        (torch.Size([2, 8]), True)
    """

    tokens: np.ndarray
    length: int
    batch: int
    seed: int

    def __post_init__(self) -> None:
        if self.length < 2 or self.batch < 1:
            raise DataError(f"a window has at least 2 tokens and a batch 1 window, got {self.length} and {self.batch}.")
        if self.tokens.ndim != 1 or len(self.tokens) < self.length:
            raise DataError(
                f"windows of {self.length} tokens need a stream at least that long, got an array of shape "
                f"{self.tokens.shape}: give more text or a shorter window."
            )

    def at(self, step: int) -> Tensor:
        """Return the batch of `step`, int64 [batch, length], on the CPU."""
        random = np.random.default_rng((self.seed, step))
        starts = random.integers(0, len(self.tokens) - self.length + 1, self.batch)
        return torch.from_numpy(np.stack([self.tokens[s : s + self.length] for s in starts]).astype(np.int64))
