"""The effect of a learned position table on attention by distance, and the weight of each distance in a fit."""

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
"""Eigenvalues of normal equations below this share of the largest are treated as 0: a constant for all keys."""
_EVEN = 0.05
"""Share of the distances' weights that is uniform; the rest is proportional to the attention paid to each."""


class TableWatch(ProfileWatch):
    """Sums, in addition to the scores, the attention paid to each distance."""

    def __init__(self, geometry: Geometry, longest: int) -> None:
        super().__init__(geometry, longest)
        self.attention = torch.zeros_like(self.profile)

    def look_at_scores(self, head: int, scores: Tensor, near: Tensor) -> None:
        super().look_at_scores(head, scores, near)
        index, seen = pairs_of(len(scores), self.distances[near], scores.device)
        paid = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        self.attention[head, near] += sums_at(index, paid[seen], int(near.sum())).cpu()


def watch_table(base: Any, geometry: Geometry, rows: Sequence[np.ndarray]) -> list[TableWatch]:
    """Run the unswapped model `base` with its table on `rows`, and return the record of each layer."""
    watches = [TableWatch(geometry, max(map(len, rows))) for _ in range(geometry.num_layers)]
    with patched(base, BESIDE_TABLE):
        read_watched(base, Mechanism(), dict(enumerate(watches)), geometry, rows)
    return watches


def inverse_of_distances(distances: Tensor, rows: Sequence[np.ndarray]) -> Tensor:
    """Return the matrix [N, N] that converts the sums by distance of a `ProfileWatch` to a function of distance.

    The function is the least-squares fit of scores by any function of the distance and a constant for each query: sums
    [H, N] times this matrix are [H, N], each row up to a constant.

    Args:
        distances: consecutive distances at which a query sees a key, [N].
        rows: the texts.
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
    """Return the weight of each distance in a fit, [N], with sum 1: mostly proportional to the attention [N].

    There are many far distances with little attention; the weights focus the fit on distances that matter to the model.

    Example:
        >>> distance_weights(torch.tensor([3.0, 1.0, 0.0, 0.0]))
        tensor([0.7250, 0.2500, 0.0125, 0.0125])
    """
    return (1 - _EVEN) * attention / attention.sum() + _EVEN / len(attention)
