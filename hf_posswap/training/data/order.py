"""The order of windows: sources by weight, each pass shuffled anew; a function of the index alone."""

from __future__ import annotations

import numpy as np

_BLOCK = 1000


class Order:
    """Maps an item's index to a source and a window of it.

    Every 1000 items hold the sources in proportion to their weights; with one source, each pass has every window once.

    Args:
        counts: windows of each source.
        weights: of each source.
        seed: of the orders.

    Example:
        >>> order = Order([3], [1.0], seed=0)
        >>> sorted(order.at(i)[1] for i in range(3)), sorted(order.at(i)[1] for i in range(3, 6))
        ([0, 1, 2], [0, 1, 2])
    """

    def __init__(self, counts: list[int], weights: list[float], seed: int) -> None:
        self.counts, self.seed = counts, seed
        shares = _whole_shares(np.array(weights) / sum(weights), 1 if len(counts) == 1 else _BLOCK)
        pattern = np.repeat(np.arange(len(counts)), shares)
        self.pattern = np.random.default_rng((seed, 0)).permutation(pattern)
        self.shares = shares
        self.rank = np.zeros(len(self.pattern), dtype=np.int64)  # of each item among those of its source
        for source in range(len(counts)):
            is_source = self.pattern == source
            self.rank[is_source] = np.arange(is_source.sum())
        self._kept: dict[tuple[int, int], np.ndarray] = {}

    def at(self, item: int) -> tuple[int, int]:
        """Return the source of item `item`, and the window in it."""
        block, index = divmod(item, len(self.pattern))
        source = int(self.pattern[index])
        nth = block * int(self.shares[source]) + int(self.rank[index])
        pass_number, rank = divmod(nth, self.counts[source])
        return source, int(self._permutation(source, pass_number)[rank])

    def _permutation(self, source: int, pass_number: int) -> np.ndarray:
        permutation = self._kept.get((source, pass_number))
        if permutation is None:
            for old in [key for key in self._kept if key[0] == source]:
                del self._kept[old]
            permutation = np.random.default_rng((self.seed, 1, source, pass_number)).permutation(self.counts[source])
            self._kept[source, pass_number] = permutation
        return permutation


def _whole_shares(shares: np.ndarray, total: int) -> np.ndarray:
    """Return integers with sum `total`, proportional to `shares` by largest remainders, each at least 1."""
    target = shares * total
    whole = np.maximum(1, np.floor(target).astype(np.int64))
    for _ in range(abs(total - int(whole.sum()))):
        too_few = int(whole.sum()) < total
        remainder = target - whole
        index = int(np.argmax(remainder)) if too_few else int(np.argmin(np.where(whole > 1, remainder, np.inf)))
        whole[index] += 1 if too_few else -1
    return whole
