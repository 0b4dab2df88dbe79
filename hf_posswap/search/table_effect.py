"""What a learned position table does to attention, by distance, as a model reads texts, and how much each counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_posswap.geometry import Geometry
from hf_posswap.patching.apply.patch_model import patched
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.search.profiles import ProfileWatch, pairs_of, read_watched, sums_at
from hf_posswap.search.tables import BESIDE_TABLE

NEGLIGIBLE = 1e-10
"""Directions of normal equations that are smaller than this share of the largest are none: a constant for all keys."""
_EVEN = 0.05
"""Share of the weights of distances that is spread evenly; the rest follows the attention paid to each."""


class TableWatch(ProfileWatch):
    """Adds up, beside the scores, the attention paid to each distance."""

    def __init__(self, geometry: Geometry, longest: int) -> None:
        super().__init__(geometry, longest)
        self.attention = torch.zeros_like(self.profile)

    def look_at_scores(self, head: int, scores: Tensor, near: Tensor) -> None:
        super().look_at_scores(head, scores, near)
        place, seen = pairs_of(len(scores), self.distances[near], scores.device)
        paid = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        self.attention[head, near] += sums_at(place, paid[seen], int(near.sum())).cpu()


def watch_table(base: Any, geometry: Geometry, rows: Sequence[np.ndarray]) -> list[TableWatch]:
    """Return what was seen of each layer of the unswapped model `base`, whose table acts, as it read `rows`."""
    watches = [TableWatch(geometry, max(map(len, rows))) for _ in range(geometry.num_layers)]
    with patched(base, BESIDE_TABLE):
        read_watched(base, Mechanism(), dict(enumerate(watches)), geometry, rows)
    return watches


def inverse_of_distances(distances: Tensor, rows: Sequence[np.ndarray]) -> Tensor:
    """Return what turns the sums by distance that a `ProfileWatch` holds into a number for each distance, [N, N].

    The number is the least-squares fit of scores by a function of the distance alone and a constant for each query,
    free of any form: sums [H, N] times this matrix are [H, N], each row up to a constant.

    Args:
        distances: [N], rising by one: those at which a query sees a key.
        rows: the texts that were read.
    """
    occurring = torch.zeros(len(distances), dtype=torch.float64)  # pairs at each distance
    shared = torch.zeros(len(distances), len(distances), dtype=torch.float64)  # over queries with both: 1 / their keys
    for length, times in Counter(map(len, rows)).items():
        keys = torch.arange(length)[:, None] - distances  # [L, N]
        seen = ((keys >= 0) & (keys < length)).double()
        occurring += times * seen.sum(dim=0)
        shared += times * (seen / seen.sum(dim=1, keepdim=True)).T @ seen
    return torch.linalg.pinv(occurring.diag() - shared, rtol=NEGLIGIBLE, hermitian=True)


def distance_weights(attention: Tensor) -> Tensor:
    """Return how much each distance counts in a fit, [N], in all 1: as the attention [N] that the table's model pays.

    Far distances are many and mostly unseen by a softmax; those that attention goes to decide what a model reads.

    Example:
        >>> distance_weights(torch.tensor([3.0, 1.0, 0.0, 0.0]))
        tensor([0.7250, 0.2500, 0.0125, 0.0125])
    """
    return (1 - _EVEN) * attention / attention.sum() + _EVEN / len(attention)
