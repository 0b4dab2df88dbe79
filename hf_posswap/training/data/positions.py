"""Draws positions beyond the window, and the text at them."""

from __future__ import annotations

import numpy as np


def pose_draw(size: int, text: int, target: int, random: np.random.Generator) -> tuple[int, int, np.ndarray]:
    """Return the first piece's length, the start of the second in the text, and the positions, int64 [size].

    PoSE with two chunks, as in https://arxiv.org/abs/2309.10400, section 3: the first piece starts at the text's
    beginning and at position 0; r ~ U[1, (size + 1) / 2]; the second starts anywhere later, its positions shifted by
    U[0, target - size].

    Args:
        size: tokens of the window.
        text: tokens of the document from the window's start on, at least `size`.
        target: positions to reach.
        random: of the draws.

    Example:
        >>> first, second, positions = pose_draw(4, 10, 100, np.random.default_rng(0))
        >>> 1 <= first <= 2, first <= second <= 10 - (4 - first), len(positions)
        (True, True, 4)
    """
    first = int(random.integers(1, (size + 1) // 2 + 1))
    second = int(random.integers(first, text - (size - first) + 1))
    positions = np.arange(size)
    positions[first:] += int(random.integers(0, target - size + 1))
    return first, second, positions


def random_positions(size: int, target: int, random: np.random.Generator) -> np.ndarray:
    """Return `size` different positions below `target`, ascending, int64 (https://arxiv.org/abs/2305.16843).

    Example:
        >>> bool((np.diff(random_positions(8, 100, np.random.default_rng(0))) > 0).all())
        True
    """
    return np.sort(random.choice(target, size, replace=False, shuffle=False))
