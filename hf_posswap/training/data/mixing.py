"""Windows of several lengths: every step reads windows of one length and the same number of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_posswap.errors import DataError
from hf_posswap.training.data.windows import TokenWindows


@dataclass(frozen=True, eq=False)
class StepRows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The rows of a number of steps: a row is one window, or the same number of tokens in several shorter windows.

    All rows of a step have windows of one length, and so has a batch, for any number of processes and any accumulation.
    An item depends only on its index and these attributes, so that reading can resume at any index.

    Attributes:
        windows: windows of each length, by the number of them in a row.
        cut: windows in a row of the first step, of the second, ..., repeated.
        rows: rows of a step, over all processes.
        steps: number of steps.
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
        """Return the row's windows, [W, L] each, with the keys of `TokenWindows`."""
        if not 0 <= item < len(self):
            raise IndexError(f"row {item} of {len(self)}")
        step, row = divmod(item, self.rows)
        per_row, earlier_steps = self._step(step)
        first = (earlier_steps * self.rows + row) * per_row
        pass_windows = self.windows[per_row].sized(first + per_row)  # extends into later passes
        chosen = [pass_windows[first + number] for number in range(per_row)]
        return {name: torch.stack([window[name] for window in chosen]) for name in chosen[0]}

    def _step(self, step: int) -> tuple[int, int]:
        """Return the windows per row of `step`, from 0, and how many earlier steps had the same number."""
        cycle, index = divmod(step, len(self.cut))
        per_row = self.cut[index]
        return per_row, cycle * self.cut.count(per_row) + self.cut[:index].count(per_row)
