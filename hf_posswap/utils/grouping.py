"""Positions in groups of so many tokens, as schemes count them that see far text coarsely."""

from __future__ import annotations

import torch
from torch import Tensor


def groups_of(positions: Tensor, size: int) -> Tensor:
    """Return floor(positions / size), whole numbers of either sign.

    Not `positions // size`: where that is a loop's own index, and `size` is above 8 and does not divide the loop's
    length, inductor's code for a CPU (torch 2.13 to 2.15) cuts the loop into whole groups and leaves the rest of the
    result unwritten.

    Example:
        >>> groups_of(torch.tensor([-1, 0, 3, 4, 11]), 4)
        tensor([-1,  0,  0,  1,  2])
    """
    return torch.div(positions - positions % size, size, rounding_mode="trunc")
