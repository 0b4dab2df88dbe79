"""A penalty that is linear in distance, as one number for each key: ALiBi at the cost of no bias.

A softmax does not change when all scores of a query do, so -m (i - j) and m j give the same attention: a bias of
[1, H, 1, K]. Where j is large, m j swallows the digits of the score beside it; so j is counted from the start of each
block of queries, and never held in less than float32.

Press et al. 2021, https://arxiv.org/abs/2108.12409, section 3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_posswap.kernels.calls import Call, attend
from hf_posswap.kernels.fused import bias_dtype

BLOCK = 1024
"""Queries that count j from the same start, where no slope is above 1."""
SMALLEST = 64
"""Such queries however steep the slopes are: where one is above 16, a key beside the query weighs next to nothing."""
NEGLIGIBLE = 17.0
"""A sum of weights below exp(-17), 4e-8 of the largest, is lost in float32 anyway."""


def attend_linear(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, *, scaling: float, windowed: bool = False
) -> Tensor:
    """Return causal attention [B, H, L, D] with -slopes[h] (i - j) added to the scores.

    Args:
        query: [B, H, L, D].
        key: [B, G, L, D].
        value: [B, G, L, D].
        slopes: [H], >= 0, without gradient.
        scaling: multiplies the scores.
        windowed: whether each head leaves out the keys that are too far for it to weigh anything in float32, whatever
            their scores, given the largest lengths of these queries and keys.
    """
    length, share = query.shape[2], query.shape[1] // key.shape[1]
    slopes = slopes.to(query.device, bias_dtype(query.dtype))
    reach = _windows(query, key, slopes, scaling, share) if windowed else [length] * key.shape[1]
    return attend([(query, key)], value, _calls(slopes, reach, length, share), scaling=scaling)


def _calls(slopes: Tensor, reach: list[int], length: int, share: int) -> list[Call]:
    """Return the calls: every block of queries to itself, then to the keys before it, heads of one reach together."""
    steepest = float(slopes.detach().amax())  # m j swallows digits as j does
    block = min(BLOCK, max(SMALLEST, int(BLOCK / max(1.0, steepest))), length)
    whole = length // block * block
    row = _row(slopes, 0, block)
    calls = [Call(0, (0, whole), (0, whole), causal=True, chunks=whole // block, bias=row)]
    if whole < length:
        calls.append(Call(0, (whole, length), (whole, length), causal=True, bias=row[..., : length - whole]))
    for start in range(block, length, block):
        for first, last, keys in _equal([min(start, tokens) for tokens in reach]):
            heads = (first * share, last * share)
            bias = _row(slopes[heads[0] : heads[1]], -keys, 0)
            queries = (start, min(start + block, length))
            calls.append(Call(0, queries, (start - keys, start), causal=False, heads=heads, bias=bias))
    return calls


def _row(slopes: Tensor, start: int, stop: int) -> Tensor:
    """Return m j for j from `start` to `stop`, [1, h, 1, stop - start]."""
    return slopes[None, :, None, None] * torch.arange(start, stop, dtype=slopes.dtype, device=slopes.device)


def _windows(query: Tensor, key: Tensor, slopes: Tensor, scaling: float, share: int) -> list[int]:
    """Return for each group how many keys before a block of queries its heads may need.

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
    """Return runs of groups with one number of keys: first, the one after the last, the number."""
    runs: list[tuple[int, int, int]] = []
    for group, number in enumerate(keys):
        if runs and runs[-1][2] == number:
            runs[-1] = (runs[-1][0], group + 1, number)
        else:
            runs.append((group, group + 1, number))
    return runs
