"""Attention whose near and far keys are rotated differently, from plain causal fused calls.

Self-Extend, ReRoPE and dual chunk attention say by how far a query and a key lie apart, in tokens or in chunks, which
pair of rotations scores them. Each such region is a few calls that need no mask, so the whole costs little more than
one causal call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_posswap.kernels.calls import Call, attend


class Region(NamedTuple):
    """The pairs of a query at i and a key at j with low <= floor(i/size) - floor(j/size) < high, and j <= i.

    Attributes:
        size: tokens in a chunk; 1: the bounds are distances in tokens.
        low: at least so far apart.
        high: less far apart than this; None: any farther.
    """

    size: int
    low: int
    high: int | None

    def holds(self, query: Tensor, key: Tensor) -> Tensor:
        """Return which of the pairs of positions, broadcast against each other, lie here; bool.

        Example:
            >>> Region(size=1, low=0, high=2).holds(torch.tensor([5]), torch.tensor([3, 4, 5, 6]))
            tensor([False,  True,  True, False])
        """
        apart = query // self.size - key // self.size if self.size > 1 else query - key
        held = apart >= self.low
        if self.low == 0 and self.size > 1:
            held = held & (key <= query)
        return held if self.high is None else held & (apart < self.high)


def mergeable(regions: Sequence[Region]) -> bool:
    """Return whether `attend_regions` knows calls for all of `regions`, and they hold every causal pair once."""
    sizes = {region.size for region in regions}
    bounds = sorted((region.low, region.high) for region in regions if region.high is not None)
    last = [region.low for region in regions if region.high is None]
    chain = [0, *(high for _, high in bounds)]
    joined = [low for low, _ in bounds] + last == chain and len(last) == 1
    one_step = all(region.high is None or region.high - region.low == 1 for region in regions)
    windowed = sizes == {1} and len(regions) == 2
    return len(sizes) == 1 and joined and (windowed or (sizes != {1} and one_step))


def attend_regions(
    pairs: Sequence[tuple[Tensor, Tensor]], value: Tensor, regions: Sequence[Region], *, scaling: float
) -> Tensor:
    """Return causal attention [B, H, L, D] of tokens at positions 0 to L - 1, each region by its own rotation.

    Regions of size 1 ask for consecutive positions only, from anywhere.

    Args:
        pairs: for each region query [B, H, L, D] and key [B, G, L, D], rotated.
        value: [B, G, L, D].
        regions: as `mergeable` takes them.
        scaling: multiplies the scores.
    """
    length = value.shape[2]
    calls = [call for pair, region in enumerate(regions) for call in _calls(pair, region, length)]
    unit = max((call.queries[1] for call in calls), default=length)
    if unit > length:  # keys that are added at the end are seen by no query but those that are added
        missing = (0, 0, 0, unit - length)
        pairs = [(_longer(query, missing), _longer(key, missing)) for query, key in pairs]
        value = _longer(value, missing)
    # the call of all queries first: the others are joined to it
    calls.sort(key=lambda call: call.queries != (0, max(unit, length)) or call.flip)
    return attend(pairs, value, calls, scaling=scaling)[:, :, :length]


def _longer(x: Tensor, missing: tuple[int, ...]) -> Tensor:
    return torch.nn.functional.pad(x, missing)


def _calls(pair: int, region: Region, length: int) -> list[Call]:
    """Return the calls that score `region` among `length` tokens; they may reach beyond the last."""
    if region.size > 1:
        return _between_chunks(pair, region, length)
    if region.high is None:  # far: the query at i meets the keys up to i - low
        return [Call(pair, (region.low, length), (0, length - region.low), causal=True)] if region.low < length else []
    return _window(pair, region.high, length)


def _window(pair: int, window: int, length: int) -> list[Call]:
    """Return the calls for the nearest `window` keys: those of the own chunk, and the later ones of the chunk before.

    Chunks are as long as the window. In the chunk before, the query at a of its own chunk sees the keys after a;
    backwards, those before w - 1 - a: without the first query and the last key that is plainly causal.
    """
    if window >= length:
        return [Call(pair, (0, length), (0, length), causal=True)]
    count = -(-length // window)
    own = Call(pair, (0, count * window), (0, count * window), causal=True, chunks=count)
    if window == 1:
        return [own]
    before = Call(pair, (window, count * window), (0, (count - 1) * window), causal=True, chunks=count - 1, flip=True)
    return [own, before]


def _between_chunks(pair: int, region: Region, length: int) -> list[Call]:
    """Return the calls for keys that lie `region.low` chunks back, or that many and more."""
    size, low = region.size, region.low
    count = -(-length // size)
    if low >= count:
        return []
    if region.high is None:
        starts = range(low * size, length, size)
        return [
            Call(pair, (start, min(start + size, length)), (0, start - (low - 1) * size), causal=False)
            for start in starts
        ]
    if count == 1:
        return [Call(pair, (0, length), (0, length), causal=True)]
    whole = count * size
    return [Call(pair, (low * size, whole), (0, whole - low * size), causal=low == 0, chunks=count - low)]
