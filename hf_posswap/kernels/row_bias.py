"""A penalty that is linear in distance, as one number for each key: ALiBi without the cost of a bias.

Softmax is invariant to a constant added to all scores of a query, so -m (i - j) and m j give the same attention: a bias
of [1, H, 1, K]. For large j, m j would lose the digits of the score, so j is counted from the start of each block of
queries, in at least float32.

Press et al. 2021, https://arxiv.org/abs/2108.12409, section 3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hf_posswap.kernels.calls import Call, arranged, attend
from hf_posswap.kernels.fused import bias_dtype
from hf_posswap.kernels.segments import Segment, tiles, whole

BLOCK = 1024
"""Queries that count j from the same start if no slope exceeds 1."""
SMALLEST = 64
"""Minimum number of such queries: with a slope above 16, even a neighbouring key has almost no weight."""
NEGLIGIBLE = 17.0
"""A sum of weights below exp(-17), 4e-8 of the largest, is lost in float32."""


def attend_linear(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor,
    *,
    scaling: float,
    windowed: bool = False,
    segments: Sequence[Segment] | None = None,
) -> Tensor:
    """Return attention [B, H, Q, D] with -slopes[h] (i - j) added to the scores.

    Args:
        query: [B, H, Q, D].
        key: [B, G, K, D].
        value: [B, G, K, D].
        slopes: [H], >= 0, without gradient.
        scaling: multiplies the scores.
        windowed: whether each head skips keys whose weight is negligible in float32 at their distance for any score,
            given the largest norms of these queries and keys.
        segments: the visible keys, none ahead of its query; None: causal, with as many keys as queries.
    """
    share = query.shape[1] // key.shape[1]
    slopes = slopes.to(query.device, bias_dtype(query.dtype))
    reach = _windows(query, key, slopes, scaling, share) if windowed else None
    seen = segments or whole(query.shape[0], query.shape[2], key.shape[2], causal=True)
    return attend([(query, key)], value, linear_calls(slopes, seen, share, reach), scaling=scaling)


def linear_calls(
    slopes: Tensor, segments: Sequence[Segment], share: int = 1, reach: Sequence[int] | None = None
) -> tuple[Call, ...]:
    """Return the calls: in each segment, every block of queries attends to itself and to the keys before it.

    Args:
        slopes: [H], in the dtype of a bias.
        segments: the visible keys.
        share: H/G.
        reach: for each group, the number of keys before a block of queries that its heads need; None: all.
    """
    steepest = float(slopes.detach().amax())  # a larger slope loses digits like a larger j
    block = min(BLOCK, max(SMALLEST, int(BLOCK / max(1.0, steepest))))

    @functools.cache  # calls with the same bias object can be merged
    def row(start: int, stop: int, backwards: bool) -> Tensor:
        # m j, [1, h, 1, stop - start]
        bias = slopes[None, :, None, None] * torch.arange(start, stop, dtype=slopes.dtype, device=slopes.device)
        return bias[..., 1:].flip(-1) if backwards else bias  # for `Call.flip`: without the first key

    calls: list[Call] = []
    for segment in segments:
        first, last = segment.first, segment.last
        step = block if first is None or last is None else max(1, min(block, last - first + 1))
        for start in range(*segment.queries, step):
            stop = min(start + step, segment.queries[1])
            calls += _block(segment, start, stop, row, share, reach)
    return arranged(calls)


def _block(
    segment: Segment,
    start: int,
    stop: int,
    row: Callable[[int, int, bool], Tensor],
    share: int,
    reach: Sequence[int] | None,
) -> Iterator[Call]:
    """Yield the calls of the queries `start` to `stop`; keys are counted from the last one the first query sees."""
    into = start - segment.queries[0]
    first = None if segment.first is None else segment.first + into
    last = None if segment.last is None else segment.last + into
    zero = segment.keys[1] if last is None else min(segment.keys[0] + last, segment.keys[1])
    for tile in tiles((start, stop), segment.keys, first, last):
        low, high = tile.keys
        bias = row(low - zero, high - zero, tile.kind == "above")
        if reach is None or tile.kind != "full" or high > zero:
            yield Call.of(tile, 0, segment.rows, bias=bias)
            continue
        for group, after, keys in _equal([min(high - low, tokens - (zero - high)) for tokens in reach]):
            if keys > 0:
                heads, near = (group * share, after * share), high - keys
                some = tile._replace(keys=(near, high))
                yield Call.of(some, 0, segment.rows, heads=heads, bias=bias[:, heads[0] : heads[1], :, near - low :])


def _windows(query: Tensor, key: Tensor, slopes: Tensor, scaling: float, share: int) -> list[int]:
    """Return for each group the number of keys before a block of queries that its heads need.

    A key at distance d weighs at most exp(2 R - m d) of the query's own, R the largest |score|; all from d on weigh
    that over 1 - exp(-m).
    """
    with torch.no_grad():
        largest = abs(scaling) * query.double().norm(dim=-1).amax() * key.double().norm(dim=-1).amax()
        exact = slopes.double()
        needed = (2 * largest + NEGLIGIBLE - torch.log(-torch.expm1(-exact))) / exact  # [H]
        by_group = needed.unflatten(0, (-1, share)).amax(dim=1).tolist()  # [G]
    return [math.ceil(tokens) if math.isfinite(tokens) else 2**62 for tokens in by_group]


def _equal(keys: list[int]) -> list[tuple[int, int, int]]:
    """Return runs of groups with equal numbers of keys: first, stop, number."""
    runs: list[tuple[int, int, int]] = []
    for group, number in enumerate(keys):
        if runs and runs[-1][2] == number:
            runs[-1] = (runs[-1][0], group + 1, number)
        else:
            runs.append((group, group + 1, number))
    return runs
