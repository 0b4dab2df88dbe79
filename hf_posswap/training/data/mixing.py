"""Windows of several lengths, step by step: every step reads as many tokens, and one length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_posswap.errors import DataError
from hf_posswap.training.data.windows import TokenWindows


@dataclass(frozen=True, eq=False)
class StepRows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """What a number of steps read, row by row: a row is one window, or as many tokens in several shorter ones.

    All rows of a step are of one length, so that a batch is, on any number of processes and with any accumulation.
    An item depends on its index and these attributes alone: read in order, they go on anywhere.

    Attributes:
        windows: of each length, by how many of them a row holds.
        cut: windows in a row of the first step, of the second, ..., over and over.
        rows: of a step, over all processes.
        steps: to read.
    """

    windows: Mapping[int, TokenWindows]
    cut: tuple[int, ...]
    rows: int
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1 or self.rows < 1:
            raise DataError(f"a run has at least 1 step of at least 1 row, got {self.steps} of {self.rows}.")

    def __len__(self) -> int:
        return self.steps * self.rows

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        """Return the row's windows, [W, L] each, as `TokenWindows` has them."""
        if not 0 <= item < len(self):
            raise IndexError(f"row {item} of {len(self)}")
        step, place = divmod(item, self.rows)
        pieces, before = self._step(step)
        first = (before * self.rows + place) * pieces
        chosen = self.windows[pieces].sized(first + pieces)  # later passes, too
        found = [chosen[first + number] for number in range(pieces)]
        return {name: torch.stack([window[name] for window in found]) for name in found[0]}

    def _step(self, step: int) -> tuple[int, int]:
        """Return the windows in a row of `step`, counted from 0, and how many steps before it had as many."""
        turn, at = divmod(step, len(self.cut))
        pieces = self.cut[at]
        return pieces, turn * self.cut.count(pieces) + self.cut[:at].count(pieces)
