"""Which window comes when: each source by its weight, each pass in an order of its own; a function of the index."""

from __future__ import annotations

import numpy as np

_BLOCK = 1000


class Order:
    """Says which window of which source item i is.

    Every 1000 items hold the sources in proportion to their weights; with one source each pass has every window once.

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
        self.rank = np.zeros(len(self.pattern), dtype=np.int64)  # of each place among those of its source
        for source in range(len(counts)):
            places = self.pattern == source
            self.rank[places] = np.arange(places.sum())
        self._kept: dict[tuple[int, int], np.ndarray] = {}

    def at(self, item: int) -> tuple[int, int]:
        """Return the source of item `item`, and the window in it."""
        block, place = divmod(item, len(self.pattern))
        source = int(self.pattern[place])
        nth = block * int(self.shares[source]) + int(self.rank[place])
        turn, within = divmod(nth, self.counts[source])
        return source, int(self._permutation(source, turn)[within])

    def _permutation(self, source: int, turn: int) -> np.ndarray:
        found = self._kept.get((source, turn))
        if found is None:
            for old in [key for key in self._kept if key[0] == source]:
                del self._kept[old]
            found = np.random.default_rng((self.seed, 1, source, turn)).permutation(self.counts[source])
            self._kept[source, turn] = found
        return found


def _whole_shares(shares: np.ndarray, total: int) -> np.ndarray:
    """Return whole numbers of sum `total` nearest to `shares` times it (largest remainders), each at least 1."""
    wanted = shares * total
    whole = np.maximum(1, np.floor(wanted).astype(np.int64))
    for _ in range(abs(total - int(whole.sum()))):
        more = int(whole.sum()) < total
        gap = wanted - whole
        place = int(np.argmax(gap)) if more else int(np.argmin(np.where(whole > 1, gap, np.inf)))
        whole[place] += 1 if more else -1
    return whole
