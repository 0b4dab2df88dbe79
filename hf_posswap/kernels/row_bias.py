"""A penalty that is linear in distance, as one number for each key: ALiBi without the cost of a bias.

Softmax is invariant to a constant added to all scores of a query, so -m (i - j) and m j give the same attention: a bias
of [1, H, 1, K]. For large j, m j would lose the digits of the score, so j is counted from the start of each block of
queries, in at least float32.

Press et al. 2021, https://arxiv.org/abs/2108.12409, section 3.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hf_posswap.kernels.calls import Call, arranged, attend
from hf_posswap.kernels.fused import bias_dtype
from hf_posswap.kernels.segments import Segment, tiles, whole

BLOCK = 1024
"""Queries that count j from the same start if no slope exceeds 1."""
BLOCK_WITH_GRADIENTS = 512
"""The same where gradients are wanted: what a backward leaves out for a whole block is then more."""
SMALLEST = 64
"""Minimum number of such queries: with a slope above 16, even a neighbouring key has almost no weight."""
EVERY_KEY = 2**62
"""Number of keys of a head whose scores, or slope, bound nothing."""
Windows = tuple[tuple[int, int, int], ...]
"""Runs of heads: the first, the one after the last, and the number of keys that they need before a block of queries."""


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
        windowed: whether each head skips the keys that `windows_of` leaves out.
        segments: the visible keys, none ahead of its query; None: causal, with as many keys as queries.
    """
    seen = segments or whole(query.shape[0], query.shape[2], key.shape[2], causal=True)
    windows = windows_of(query, key, slopes, seen, scaling) if windowed else None
    slopes = slopes.to(query.device, bias_dtype(query.dtype))
    with_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    calls = linear_calls(slopes, seen, windows, with_gradients=with_gradients)
    return attend([(query, key)], value, calls, scaling=scaling)


def linear_calls(
    slopes: Tensor, segments: Sequence[Segment], windows: Windows | None = None, *, with_gradients: bool
) -> tuple[Call, ...]:
    """Return the calls: in each segment, every block of queries attends to itself and to the keys before it.

    Args:
        slopes: [H], in the dtype of a bias.
        segments: the visible keys.
        windows: the keys that heads need; None: all.
        with_gradients: whether they are wanted; they are slow for keys far beyond a window, of which smaller blocks of
            queries have fewer.
    """

    @functools.cache  # calls with the same bias object can be merged
    def row(heads: tuple[int, int] | None, start: int, stop: int, backwards: bool) -> Tensor:
        # m j, [1, h, 1, stop - start]
        numbers = torch.arange(start, stop, dtype=slopes.dtype, device=slopes.device)
        bias = slopes[None, slice(*(heads or (None,))), None, None] * numbers
        return bias[..., 1:].flip(-1) if backwards else bias  # for `Call.flip`: without the first key

    calls: list[Call] = []
    longest = _longest(segments)
    for first, stop, keys in windows or ((0, len(slopes), longest),):
        steepest = float(slopes[first:stop].detach().amax())  # a larger slope loses digits like a larger j
        block = min(BLOCK, max(SMALLEST, int(BLOCK / max(1.0, steepest))), max(1, keys))
        if with_gradients:
            block = min(block, BLOCK_WITH_GRADIENTS, max(SMALLEST, keys // 4))
        heads = None if (first, stop) == (0, len(slopes)) else (first, stop)
        calls += (call for segment in segments for call in _blocks(segment, block, heads, keys, row))
    return arranged(calls)


def _blocks(
    segment: Segment,
    block: int,
    heads: tuple[int, int] | None,
    keys: int,
    row: Callable[[tuple[int, int] | None, int, int, bool], Tensor],
) -> Iterator[Call]:
    """Yield the calls of `heads`; the keys of a block are counted from the last one that its first query sees.

    Args:
        segment: the visible keys.
        block: queries that count keys from the same one.
        heads: as in `Call`.
        keys: that these heads need before a block.
        row: gives m j of heads, for j from one number to another.
    """
    first, last = segment.first, segment.last
    step = block if first is None or last is None else max(1, min(block, last - first + 1))
    for start in range(*segment.queries, step):
        stop, into = min(start + step, segment.queries[1]), start - segment.queries[0]
        after = None if first is None else first + into
        upto = None if last is None else last + into
        zero = segment.keys[1] if upto is None else min(segment.keys[0] + upto, segment.keys[1])
        for tile in tiles((start, stop), segment.keys, after, upto):
            low, high = tile.keys
            if tile.kind == "full" and high <= zero:
                low = max(low, zero - keys)
            if low < high:
                bias = row(heads, low - zero, high - zero, tile.kind == "above")
                yield Call.of(tile._replace(keys=(low, high)), 0, segment.rows, heads=heads, bias=bias)


def windows_of(query: Tensor, key: Tensor, slopes: Tensor, segments: Sequence[Segment], scaling: float) -> Windows:
    """Return runs of heads that need equally many keys, whatever the scores, rounded up to few sizes.

    A run of several groups has whole ones, and another run stays within its group.

    Args:
        query: [B, H, Q, D].
        key: [B, G, K, D].
        slopes: [H], >= 0.
        segments: the visible keys.
        scaling: multiplies the scores.
    """
    share, longest = query.shape[1] // key.shape[1], _longest(segments)
    sizes: list[int] = []
    for tokens in _needed(query, key, slopes, scaling):
        in_blocks = -(-tokens // BLOCK) * BLOCK
        power_of_two = max(SMALLEST, 1 << (max(1, tokens) - 1).bit_length())
        sizes.append(min(longest, in_blocks, power_of_two if tokens <= BLOCK else in_blocks))
    runs: list[tuple[int, int, int]] = []
    for start in range(0, len(sizes), share):
        first = start
        for size, same in itertools.groupby(sizes[start : start + share]):
            stop = first + len(tuple(same))
            if runs and stop - first == share and runs[-1][2] == size and runs[-1][1] - runs[-1][0] >= share:
                first = runs.pop()[0]
            runs.append((first, stop, size))
            first = stop
    return tuple(runs)


def skipped(windows: Windows, segments: Sequence[Segment]) -> float:
    """Return the share of all heads' keys, at the end of the longest segment, that `windows` leave out."""
    heads = sum(stop - first for first, stop, _ in windows)
    return 1 - sum((stop - first) * keys for first, stop, keys in windows) / (heads * max(1, _longest(segments)))


def _needed(query: Tensor, key: Tensor, slopes: Tensor, scaling: float) -> list[int]:
    """Return for each head the number of keys before a block of queries that it needs, whatever the scores.

    A key at distance d from the nearest weighs at most exp(2 R - m d) of it, R the largest |score|, which the largest
    norms bound; all from d on weigh that over 1 - exp(-m). What is left out weighs less than half of the last digit of
    float32, or of float64 for such queries.
    """
    with torch.no_grad():
        wide = bias_dtype(query.dtype)
        norms = [torch.linalg.vector_norm(x, dim=-1, dtype=wide).amax(dim=(0, 2)).double() for x in (query, key)]
        most = abs(scaling) * 1.001 * norms[0].unflatten(0, (len(norms[1]), -1)) * norms[1][:, None]  # [G, H/G]
        exact = slopes.to(query.device).double()
        negligible = -math.log(torch.finfo(wide).eps / 2)
        needed = (2 * most.flatten() + negligible - torch.log(-torch.expm1(-exact))) / exact  # [H]
    return [math.ceil(tokens) if math.isfinite(tokens) else EVERY_KEY for tokens in needed.tolist()]


def _longest(segments: Sequence[Segment]) -> int:
    return max((segment.keys[1] - segment.keys[0] for segment in segments), default=0)
