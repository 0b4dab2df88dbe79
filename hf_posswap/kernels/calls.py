"""Attention as a few fused calls over parts of the keys, merged by the logarithms of their sums.

Each query's softmax over all keys is the mean of its softmaxes over parts of them, weighted by those parts' sums of
exp(score). Forward and backward hold no [Q, K] tensor: the backward of each call receives the merged result and sums,
and so yields its share of the whole gradient.

Dao et al. 2022, https://arxiv.org/abs/2205.14135, section 3.1 and appendix B.4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_posswap.kernels import fused
from hf_posswap.kernels.segments import Tile

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

    class _Context(FunctionCtx):
        """What the forward keeps for the backward."""

        saved_tensors: tuple[Tensor, ...]
        calls: tuple[Call, ...]
        scaling: float


@dataclass(frozen=True)
class Call:
    """One fused call, over a range of queries and a range of keys, or over many equal consecutive ranges.

    Attributes:
        pair: index of its query and key tensors.
        queries: range of queries, [first, stop).
        keys: range of keys, [first, stop).
        causal: whether the n-th query of a chunk sees only the keys up to the n-th of its chunk.
        chunks: number of equal ranges of queries and keys; each range of queries attends to its own range of keys.
        flip: whether each range is reversed; without the first query and the last key, "causal" then means that only
            keys at a later index than the query are visible.
        heads: range of heads, multiples of H/G or within those that share a key; None: all.
        bias: [1, h, 1 or q, k], without gradient, the same in every chunk, in the order of the keys in the call, or
            None.
        rows: range of rows of the batch; None: all.
        is_first: whether no earlier call has these queries and heads, so that there is nothing to merge with.
    """

    pair: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool
    chunks: int = 1
    flip: bool = False
    heads: tuple[int, int] | None = None
    bias: Tensor | None = None
    rows: tuple[int, int] | None = None
    is_first: bool = False

    @classmethod
    def of(cls, tile: Tile, pair: int, rows: tuple[int, int], **more: Any) -> Call:
        """Return the call for `tile`; see `Call` for the rest."""
        return cls(pair, tile.queries, tile.keys, tile.kind != "full", flip=tile.kind == "above", rows=rows, **more)

    def query_rows(self, x: Tensor) -> Tensor:
        """Return the queries of this call from `x` [B, H, Q, ...], [b chunks, h, q, ...]."""
        rows = self._chunked(self._of_heads(x, 1), self.queries)
        return rows[:, :, 1:] if self.flip else rows

    def key_rows(self, x: Tensor, share: int) -> Tensor:
        """Return the keys of this call from `x` [B, G, K, D], [b chunks, g, k, D]; `share` is H/G."""
        rows = self._chunked(self._of_heads(x, share), self.keys)
        return rows[:, :, :-1] if self.flip else rows

    def query_back(self, rows: Tensor, fill: float) -> Tensor:
        """Invert `query_rows`: return rows in the order of the queries, [b, h, queries, ...]."""
        if self.flip:
            rows = torch.cat((rows.new_full((*rows.shape[:2], 1, *rows.shape[3:]), fill), rows), dim=2)
        return self._whole(rows)

    def key_back(self, rows: Tensor) -> Tensor:
        """Invert `key_rows`: return rows in the order of the keys, [b, g, keys, D]."""
        if self.flip:
            rows = torch.cat((rows, rows.new_zeros((*rows.shape[:2], 1, *rows.shape[3:]))), dim=2)
        return self._whole(rows)

    def view(self, x: Tensor, share: int, span: tuple[int, int]) -> Tensor:
        """Return the view of `x` [B, H, L, ...] at this call's rows, heads and `span`."""
        return self._of_heads(x, share)[:, :, span[0] : span[1]]

    def _of_heads(self, x: Tensor, share: int) -> Tensor:
        x = x if self.rows is None else x[self.rows[0] : self.rows[1]]
        return x if self.heads is None else x[:, self.heads[0] // share : -(-self.heads[1] // share)]

    def _chunked(self, x: Tensor, span: tuple[int, int]) -> Tensor:
        x = x[:, :, span[0] : span[1]]
        if self.chunks > 1:
            x = x.unflatten(2, (self.chunks, -1)).transpose(1, 2).flatten(0, 1)
        return x.flip(2) if self.flip else x

    def _whole(self, rows: Tensor) -> Tensor:
        rows = rows.flip(2) if self.flip else rows
        if self.chunks == 1:
            return rows
        return rows.unflatten(0, (-1, self.chunks)).transpose(1, 2).flatten(2, 3)


def arranged(calls: Iterable[Call]) -> tuple[Call, ...]:
    """Merge equal consecutive calls to chunks, and set `is_first` of each."""
    runs: dict[object, Call] = {}
    for number, call in enumerate(calls):
        sizes = (call.queries[1] - call.queries[0], call.keys[1] - call.keys[0])
        group = (call.pair, call.causal, call.flip, call.heads, call.rows, id(call.bias), sizes)
        last = runs.get(group)
        if last is not None and last.queries[1] == call.queries[0] and last.keys[1] == call.keys[0]:
            queries, keys = (last.queries[0], call.queries[1]), (last.keys[0], call.keys[1])
            runs[group] = dataclasses.replace(last, queries=queries, keys=keys, chunks=last.chunks + 1)
            continue
        if last is not None:
            runs[group, number] = last  # it is complete; later calls may extend the new one
        runs[group] = call
    ordered = sorted(runs.values(), key=lambda call: (call.queries[0] - call.queries[1], call.flip))
    coverage = _QueryCoverage(ordered)
    return tuple(dataclasses.replace(call, is_first=coverage.is_first(call)) for call in ordered)


def numbered_anew(calls: Sequence[Call]) -> tuple[tuple[int, ...], tuple[Call, ...]]:
    """Return the indices of the pairs in `calls`, and the calls with pairs renumbered from 0."""
    numbers = sorted({call.pair for call in calls})
    return tuple(numbers), tuple(dataclasses.replace(call, pair=numbers.index(call.pair)) for call in calls)


class _QueryCoverage:
    """The queries, by rows and heads, that earlier calls cover."""

    def __init__(self, calls: Sequence[Call]) -> None:
        rows = max((call.rows[1] for call in calls if call.rows is not None), default=1)
        queries = max((call.queries[1] for call in calls), default=0)
        # one entry per head if calls differ by head
        heads = max((call.heads[1] for call in calls if call.heads is not None), default=1)
        self.covered = np.zeros((rows, heads, queries), dtype=bool)

    def is_first(self, call: Call) -> bool:
        """Return whether no query of `call` was covered before, and mark them as covered."""
        region = self.covered[slice(*(call.rows or (None,))), slice(*(call.heads or (None,))), slice(*call.queries)]
        first = not region.any()
        region[:] = True
        return first


def attend(pairs: Sequence[tuple[Tensor, Tensor]], value: Tensor, calls: Sequence[Call], *, scaling: float) -> Tensor:
    """Return softmax attention [B, H, Q, D] over everything that `calls` score.

    Args:
        pairs: query [B, H, Q, D] and key [B, G, K, D], each pair with its own rotation.
        value: [B, G, K, D].
        calls: disjoint in query-key pairs; a query in none of them gets zeros.
        scaling: multiplies the scores.
    """
    flat = [tensor for pair in pairs for tensor in pair]
    return _Joined.apply(tuple(calls), scaling, value, *flat)


def _joined(calls: Sequence[Call], scaling: float, value: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return attention [B, H, Q, D] and the logarithm of its sums [B, H, Q]."""
    query = tensors[0]
    share = query.shape[1] // value.shape[1]
    joined: tuple[Tensor, Tensor] | None = None
    for call in calls:
        out, sums = fused.forward(
            call.query_rows(tensors[2 * call.pair]),
            call.key_rows(tensors[2 * call.pair + 1], share),
            call.key_rows(value, share),
            scaling=scaling,
            causal=call.causal,
            bias=call.bias,
        )
        out, sums = call.query_back(out, 0.0), call.query_back(sums, -torch.inf)
        if joined is None and out.shape == query.shape:
            joined = out, sums  # of all queries: the other calls are joined to it
            continue
        joined = joined or _nothing(query)
        whole, total = (call.view(x, 1, call.queries) for x in joined)
        if call.is_first:
            whole.copy_(out)
            total.copy_(sums)
        else:
            _join(whole, total, out, sums)
    return joined or _nothing(query)


def _nothing(query: Tensor) -> tuple[Tensor, Tensor]:
    """Return what attention to no key gives: zeros, in the memory layout for the following layer, and -inf."""
    batch, heads, length, width = query.shape
    whole = query.new_zeros(batch, length, heads, width).transpose(1, 2)
    total = torch.full(query.shape[:3], -torch.inf, dtype=fused.bias_dtype(query.dtype), device=query.device)
    return whole, total


def _join(out: Tensor, sums: Tensor, more: Tensor, more_sums: Tensor) -> None:
    """Merge attention over more keys into `out` [B, H, q, D] and `sums` [B, H, q], in place."""
    # weight of the new part: exp(b) / (exp(a) + exp(b)); if both are empty it is 0/0, and the old part is kept
    weight = torch.sigmoid(more_sums - sums).nan_to_num_(nan=0.0)[..., None]
    out.lerp_(more, weight.to(out.dtype))
    torch.logaddexp(sums, more_sums, out=sums)


class _Joined(torch.autograd.Function):
    """`attend`, with its gradients."""

    @staticmethod
    def forward(ctx: _Context, calls: tuple[Call, ...], scaling: float, value: Tensor, *tensors: Tensor) -> Tensor:
        out, sums = _joined(calls, scaling, value, tensors)
        ctx.save_for_backward(out, sums, value, *tensors)
        ctx.calls, ctx.scaling = calls, scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, sums, value, *tensors = ctx.saved_tensors
        share = out.shape[1] // value.shape[1]
        grads = [torch.zeros_like(x) for x in (value, *tensors)]
        for call in ctx.calls:
            query, key = tensors[2 * call.pair], tensors[2 * call.pair + 1]
            to_query, to_key, to_value = fused.backward(
                call.query_rows(grad),
                call.query_rows(query),
                call.key_rows(key, share),
                call.key_rows(value, share),
                call.query_rows(out),
                call.query_rows(sums),
                scaling=ctx.scaling,
                causal=call.causal,
                bias=call.bias,
            )
            call.view(grads[1 + 2 * call.pair], 1, call.queries).add_(call.query_back(to_query, 0.0))
            call.view(grads[2 + 2 * call.pair], share, call.keys).add_(call.key_back(to_key))
            call.view(grads[0], share, call.keys).add_(call.key_back(to_value))
        return None, None, *grads
