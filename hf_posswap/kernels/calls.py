"""Attention as a few fused calls over parts of the keys, joined by the logarithms of their sums.

Each query's softmax over all keys is the mean of its softmaxes over parts of them, weighted by those parts' sums of
exp(score). Forward and backward hold nothing of [Q, K]: the backward of each call is given the joined result and sums,
and so yields its share of the whole's gradient.

Dao et al. 2022, https://arxiv.org/abs/2205.14135, section 3.1 and appendix B.4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_posswap.kernels import fused
from hf_posswap.kernels.segments import Tile


@dataclass(frozen=True)
class Call:
    """One fused call, over a range of queries and a range of keys, or over many equal ranges side by side.

    Attributes:
        pair: which of the query and key tensors it takes.
        queries: first, and the one after the last.
        keys: first, and the one after the last.
        causal: whether the n-th query of a chunk sees the keys up to the n-th of its own only.
        chunks: into how many equal ranges queries and keys are cut, each query range attending to its own key range.
        flip: whether each range is taken backwards; with one query less at its start and one key less at its end
            "causal" then means: only the keys later in their range than the query is in its own.
        heads: first head, and the one after the last, multiples of H/G; None: all.
        bias: [1, h, 1 or q, k], without gradient, the same in every chunk, as the call takes the keys; None: nothing is
            added.
        rows: of the batch: first, and the one after the last; None: all.
        is_first: whether no call before it has these queries and heads, so that there is nothing to be joined to.
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
        """Return the part of `x` [B, H, Q, ...] that the queries of this call have, [b chunks, h, q, ...]."""
        rows = self._chunked(self._of_heads(x, 1), self.queries)
        return rows[:, :, 1:] if self.flip else rows

    def key_rows(self, x: Tensor, share: int) -> Tensor:
        """Return the part of `x` [B, G, K, D] that this call attends to, [b chunks, g, k, D]; `share` is H/G."""
        rows = self._chunked(self._of_heads(x, share), self.keys)
        return rows[:, :, :-1] if self.flip else rows

    def query_back(self, rows: Tensor, fill: float) -> Tensor:
        """Return what `query_rows` took, in the order of the queries: [b, h, queries, ...]."""
        if self.flip:
            rows = torch.cat((rows.new_full((*rows.shape[:2], 1, *rows.shape[3:]), fill), rows), dim=2)
        return self._whole(rows)

    def key_back(self, rows: Tensor) -> Tensor:
        """Return what `key_rows` took, in the order of the keys: [b, g, keys, D]."""
        if self.flip:
            rows = torch.cat((rows, rows.new_zeros((*rows.shape[:2], 1, *rows.shape[3:]))), dim=2)
        return self._whole(rows)

    def part(self, x: Tensor, share: int, span: tuple[int, int]) -> Tensor:
        """Return the view of `x` [B, H, L, ...] that this call's rows, heads and `span` are."""
        return self._of_heads(x, share)[:, :, span[0] : span[1]]

    def _of_heads(self, x: Tensor, share: int) -> Tensor:
        x = x if self.rows is None else x[self.rows[0] : self.rows[1]]
        return x if self.heads is None else x[:, self.heads[0] // share : self.heads[1] // share]

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
    """Return `calls` with those that are alike, side by side, made one, and each knowing whether it is the first."""
    runs: dict[Any, Call] = {}
    for number, call in enumerate(calls):
        alike = (call.pair, call.causal, call.flip, call.heads, call.rows, id(call.bias), _lengths(call))
        last = runs.get(alike)
        if last is not None and last.queries[1] == call.queries[0] and last.keys[1] == call.keys[0]:
            queries, keys = (last.queries[0], call.queries[1]), (last.keys[0], call.keys[1])
            runs[alike] = dataclasses.replace(last, queries=queries, keys=keys, chunks=last.chunks + 1)
            continue
        if last is not None:
            runs[alike, number] = last  # it is complete; those that follow are alike to the new one
        runs[alike] = call
    ordered = sorted(runs.values(), key=lambda call: (call.queries[0] - call.queries[1], call.flip))
    taken = _Taken(ordered)
    return tuple(dataclasses.replace(call, is_first=taken.is_first(call)) for call in ordered)


def numbered_anew(calls: Sequence[Call]) -> tuple[tuple[int, ...], tuple[Call, ...]]:
    """Return the numbers of the pairs that `calls` take, and the calls with these pairs counted from 0."""
    numbers = sorted({call.pair for call in calls})
    return tuple(numbers), tuple(dataclasses.replace(call, pair=numbers.index(call.pair)) for call in calls)


def _lengths(call: Call) -> tuple[int, int]:
    return call.queries[1] - call.queries[0], call.keys[1] - call.keys[0]


class _Taken:
    """Which queries, of which rows and heads, calls have had so far."""

    def __init__(self, calls: Sequence[Call]) -> None:
        rows = max((call.rows[1] for call in calls if call.rows is not None), default=1)
        queries = max((call.queries[1] for call in calls), default=0)
        # where heads are told apart, each has its own
        heads = max((call.heads[1] for call in calls if call.heads is not None), default=1)
        self.had = np.zeros((rows, heads, queries), dtype=bool)

    def is_first(self, call: Call) -> bool:
        """Return whether none of the queries of `call` was had before; now they are."""
        part = self.had[slice(*(call.rows or (None,))), slice(*(call.heads or (None,))), slice(*call.queries)]
        first = not part.any()
        part[:] = True
        return first


def attend(pairs: Sequence[tuple[Tensor, Tensor]], value: Tensor, calls: Sequence[Call], *, scaling: float) -> Tensor:
    """Return softmax attention [B, H, Q, D] over everything that `calls` score.

    Args:
        pairs: query [B, H, Q, D] and key [B, G, K, D], each pair rotated in its own way.
        value: [B, G, K, D].
        calls: no pair of a query and a key in two of them; a query in none of them gets zeros.
        scaling: multiplies the scores.
    """
    flat = [tensor for pair in pairs for tensor in pair]
    return _Joined.apply(tuple(calls), scaling, value, *flat)


def _settings(call: Call, scaling: float) -> dict[str, Any]:
    return {"scaling": scaling, "causal": call.causal, "bias": call.bias}


def _joined(calls: Sequence[Call], scaling: float, value: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return attention [B, H, Q, D] and the logarithm of its sums [B, H, Q]."""
    query = tensors[0]
    share = query.shape[1] // value.shape[1]
    batch, heads, length, width = query.shape
    # laid out as the layer that follows wants it
    whole = query.new_zeros(batch, length, heads, width).transpose(1, 2)
    total = torch.full(query.shape[:3], -torch.inf, dtype=fused.bias_dtype(query.dtype), device=query.device)
    for call in calls:
        out, sums = fused.forward(
            call.query_rows(tensors[2 * call.pair]),
            call.key_rows(tensors[2 * call.pair + 1], share),
            call.key_rows(value, share),
            **_settings(call, scaling),
        )
        out, sums = call.query_back(out, 0.0), call.query_back(sums, -torch.inf)
        if len(calls) == 1 and out.shape == query.shape:
            return out, sums
        at = call.part(whole, 1, call.queries), call.part(total, 1, call.queries)
        if call.is_first:
            at[0].copy_(out)
            at[1].copy_(sums)
        else:
            _join(*at, out, sums)
    return whole, total


def _join(out: Tensor, sums: Tensor, more: Tensor, more_sums: Tensor) -> None:
    """Join attention over more keys into `out` [B, H, q, D] and `sums` [B, H, q], in place."""
    # weight of the new part: exp(b) / (exp(a) + exp(b)); where both are empty it is 0/0, and the old part stays
    weight = torch.sigmoid(more_sums - sums).nan_to_num_(nan=0.0)[..., None]
    out.lerp_(more, weight.to(out.dtype))
    torch.logaddexp(sums, more_sums, out=sums)


class _Joined(torch.autograd.Function):
    """`attend`, with its gradients."""

    @staticmethod
    def forward(ctx: Any, calls: tuple[Call, ...], scaling: float, value: Tensor, *tensors: Tensor) -> Tensor:
        out, sums = _joined(calls, scaling, value, tensors)
        ctx.save_for_backward(out, sums, value, *tensors)
        ctx.calls, ctx.scaling = calls, scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
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
                **_settings(call, ctx.scaling),
            )
            call.part(grads[1 + 2 * call.pair], 1, call.queries).add_(call.query_back(to_query, 0.0))
            call.part(grads[2 + 2 * call.pair], share, call.keys).add_(call.key_back(to_key))
            call.part(grads[0], share, call.keys).add_(call.key_back(to_value))
        return None, None, *grads
