"""T5's relative position bias: one learned number for each bucket of distances and head.

Raffel et al. 2019, https://arxiv.org/abs/1910.10683, section 2.1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes.base import SCHEMES, Kind, Scheme
from hf_posswap.schemes.common import checks
from hf_posswap.schemes.common.bias import DistanceMechanism, LinearBias, generator, parameter, rounded
from hf_posswap.schemes.mechanism import Mechanism

MOST_BUCKETS = 2**12
FARTHEST = 2**20
"""The largest max_distance, in tokens: each distance up to it has an entry in a list."""


def buckets(num_buckets: int, max_distance: int, *, causal: bool) -> Tensor:
    """Return the bucket of each distance query - key from -max_distance to max_distance, [2 max_distance + 1], int64.

    Distances of one side below n/2, n its number of buckets, have a bucket each; the others share
    n/2 + floor(n/2 * ln(2 distance / n) / ln(2 max_distance / n)), at most n - 1. A causal model has all buckets for
    the past; else the second half of them is for the keys that come after the query. The logarithm is float32, as in
    T5's training, so that a distance on the edge of two buckets falls into the same one.

    Example:
        >>> buckets(4, 8, causal=True).tolist()
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 3]
    """
    side = num_buckets if causal else num_buckets // 2
    exact = side // 2
    distance = torch.arange(max_distance + 1, device="cpu")
    ratio = (distance.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    shared = (exact + (ratio * (side - exact)).long()).clamp(max=side - 1)
    past = torch.where(distance < exact, distance, shared)  # [max_distance + 1]
    future = torch.zeros_like(past) if causal else side + past
    return torch.cat((future[1:].flip(0), past))


def _rows(owner: str, given: Any, count: int) -> tuple[tuple[float, ...], ...]:
    """Return `given` as the rows of a table of `count` buckets.

    Raises:
        SchemeError: it is not such a table; the message says why.
    """
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    rows = [row for row in given if isinstance(row, Sequence) and not isinstance(row, str) and row] if listed else []
    if not rows or len(rows) != len(given) or len({len(row) for row in rows}) > 1:
        raise SchemeError(
            f"{owner}: start must be a list of lists, for each bucket a number for each head, got {given!r}."
        )
    if len(rows) != count:
        raise SchemeError(f"{owner}: start has {len(rows)} buckets, and num_buckets is {count}.")
    numbers = [
        [checks.number(owner, f"start[{i}][{h}]", item) for h, item in enumerate(row)] for i, row in enumerate(rows)
    ]
    return tuple(map(tuple, numbers))


@SCHEMES.register("t5")
@dataclass(frozen=True)
class T5Bias(LinearBias):
    """T5's bias: score + table[bucket(i - j), h], the table learned and shared by the layers.

    It is added to the scaled score q k / sqrt(D); T5 itself does not scale. With `init_std` 0 the swapped model starts
    without positions (nope): the bias has to be trained.

    Attributes:
        num_buckets: rows of the table, even in an encoder, where half are for each side.
        max_distance: distance, in tokens, from which all keys share the last bucket of their side.
        init_std: standard deviation of the normal distribution of the initial table; 0: it starts at zero.
        seed: of those numbers.
        start: the initial table instead: for each bucket a number for each head. `hf_posswap.fit_bias` finds the one
            closest to a learned table, for each layer.

    Example:
        >>> T5Bias().num_buckets, T5Bias().max_distance
        (32, 128)
    """

    __repr__ = Scheme.short_repr

    name: ClassVar[str] = "t5"
    summary: ClassVar[str] = "T5's bias: a learned number for each bucket of distances and head"
    source: ClassVar[str] = "https://arxiv.org/abs/1910.10683"
    kind: ClassVar[Kind] = "bias"
    fitted_fields: ClassVar[tuple[str, ...]] = ("init_std", "start")

    num_buckets: int = 32
    max_distance: int = 128
    init_std: float = 0.0
    seed: int = 0
    start: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        checks.whole(self.name, "num_buckets", self.num_buckets, minimum=2, maximum=MOST_BUCKETS)
        checks.whole(self.name, "max_distance", self.max_distance, minimum=1, maximum=FARTHEST)
        object.__setattr__(
            self, "init_std", checks.number(self.name, "init_std", self.init_std, minimum=0.0, maximum=1e3)
        )
        checks.whole(self.name, "seed", self.seed, minimum=0, maximum=checks.LARGEST_SEED)
        if self.start is not None:
            object.__setattr__(self, "start", _rows(self.name, self.start, self.num_buckets))
            if self.init_std:
                raise SchemeError(
                    f"{self.name}: start already sets the initial table, got init_std={self.init_std:g} as well."
                )

    def resolve(self, geometry: Geometry, max_length: int | None) -> Self:
        super().resolve(geometry, max_length)
        side = self.num_buckets if geometry.causal else self.num_buckets // 2
        if side < 2 or (self.num_buckets % 2 and not geometry.causal):
            raise SchemeError(
                f"{self.name}: in an encoder half of num_buckets are for each side, so it must be even and at least "
                f"4, got {self.num_buckets}."
            )
        if self.max_distance <= side // 2:
            raise SchemeError(
                f"{self.name}: num_buckets={self.num_buckets} gives each of the first {side // 2} distances its "
                f"own bucket here, so max_distance must be more than {side // 2}, got {self.max_distance}."
            )
        if self.start is not None and len(self.start[0]) != geometry.num_heads:
            raise SchemeError(
                f"{self.name}: start has {len(self.start[0])} numbers for each bucket, and this model has "
                f"{geometry.num_heads} heads; give one each."
            )
        return self

    def mechanism(self, geometry: Geometry) -> Mechanism:
        return T5Mechanism(self, geometry)

    def features(self, distances: Tensor, geometry: Geometry) -> Tensor:
        known = buckets(self.num_buckets, self.max_distance, causal=geometry.causal)
        row = known[distances.clamp(-self.max_distance, self.max_distance) + self.max_distance]  # [N]
        return torch.nn.functional.one_hot(row, self.num_buckets).T.double()

    def with_weights(self, weights: Tensor, geometry: Geometry) -> Self:
        """Return a copy that starts with `weights` [H, num_buckets]; unseen buckets take the next nearer one's value.

        Zero would be a bias like any other there, and would usually favour far keys.
        """
        filled = weights.clone()
        side = self.num_buckets if geometry.causal else self.num_buckets // 2
        for bucket in range(self.num_buckets):
            if filled[:, bucket].isnan().any():  # the first of a side: nothing lies after the query, or at its place
                filled[:, bucket] = filled[:, bucket - 1] if bucket % side else filled[:, 0].nan_to_num()
        return dataclasses.replace(self, start=tuple(tuple(rounded(row)) for row in filled.T))

    def __str__(self) -> str:
        """Return the usual form, without the hundreds of numbers in `start`."""
        if self.start is None:
            return super().__str__()
        plain = str(dataclasses.replace(self, start=None))
        return f"{plain[:-1]}, start={len(self.start)}x{len(self.start[0])} numbers)"


class T5Mechanism(DistanceMechanism):
    """Adds table[bucket(i - j), h] to the scores.

    Attributes:
        table: learned, [num_buckets, H].
    """

    def __init__(self, scheme: T5Bias, geometry: Geometry) -> None:
        super().__init__()
        self.max_distance = scheme.max_distance
        self.bucket = buckets(scheme.num_buckets, scheme.max_distance, causal=geometry.causal)
        start = torch.zeros(scheme.num_buckets, geometry.num_heads, dtype=torch.float32, device="cpu")
        if scheme.start is not None:
            start = torch.tensor(scheme.start, dtype=torch.float32, device="cpu")
        elif scheme.init_std:
            start.normal_(std=scheme.init_std, generator=generator(scheme.seed))
        self.table = parameter(start)

    def distance_bias(self, distances: Tensor) -> Tensor:
        if self.bucket.device != distances.device:
            self.bucket = self.bucket.to(distances.device)
        row = distances.clamp(-self.max_distance, self.max_distance) + self.max_distance
        by_distance = self.table.float()[self.bucket].T  # [H, 2 max_distance + 1]
        return by_distance.index_select(1, row)

    def extra_repr(self) -> str:
        return f"buckets={self.table.shape[0]}, heads={self.table.shape[1]}, max_distance={self.max_distance}"
