"""Attention as a few fused calls over parts of the keys, joined by the logarithms of their sums.

Each query's softmax over all keys is the mean of its softmaxes over parts of them, weighted by those parts' sums of
exp(score). Forward and backward hold nothing of [Q, K]: the backward of each call is given the joined result and sums,
and so yields its share of the whole's gradient.

Dao et al. 2022, https://arxiv.org/abs/2205.14135, section 3.1 and appendix B.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_posswap.kernels import fused


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
        bias: [1, h, 1 or q, k], without gradient, the same in every chunk; None: nothing is added.
    """

    pair: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool
    chunks: int = 1
    flip: bool = False
    heads: tuple[int, int] | None = None
    bias: Tensor | None = None

    def query_rows(self, x: Tensor) -> Tensor:
        """Return the part of `x` [B, H, Q, ...] that the queries of this call have, [B chunks, h, q, ...]."""
        rows = self._chunked(self._of_heads(x, 1), self.queries)
        return rows[:, :, 1:] if self.flip else rows

    def key_rows(self, x: Tensor, share: int) -> Tensor:
        """Return the part of `x` [B, G, K, D] that this call attends to, [B chunks, g, k, D]; `share` is H/G."""
        rows = self._chunked(self._of_heads(x, share), self.keys)
        return rows[:, :, :-1] if self.flip else rows

    def query_back(self, rows: Tensor, fill: float) -> Tensor:
        """Return what `query_rows` took, in the order of the queries: [B, h, queries, ...]."""
        if self.flip:
            rows = torch.cat((rows.new_full((*rows.shape[:2], 1, *rows.shape[3:]), fill), rows), dim=2)
        return self._whole(rows)

    def key_back(self, rows: Tensor) -> Tensor:
        """Return what `key_rows` took, in the order of the keys: [B, g, keys, D]."""
        if self.flip:
            rows = torch.cat((rows, rows.new_zeros((*rows.shape[:2], 1, *rows.shape[3:]))), dim=2)
        return self._whole(rows)

    def part(self, x: Tensor, share: int, span: tuple[int, int]) -> Tensor:
        """Return the view of `x` [B, H, L, ...] that this call's heads and `span` are."""
        return self._of_heads(x, share)[:, :, span[0] : span[1]]

    def _of_heads(self, x: Tensor, share: int) -> Tensor:
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


def attend(pairs: Sequence[tuple[Tensor, Tensor]], value: Tensor, calls: Sequence[Call], *, scaling: float) -> Tensor:
    """Return softmax attention [B, H, Q, D] over everything that `calls` score.

    Args:
        pairs: query [B, H, Q, D] and key [B, G, K, D], each pair rotated in its own way.
        value: [B, G, K, D].
        calls: no pair of a query and a key in two of them, each query in one at least.
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
    first = None
    for call in calls:
        out, sums = fused.forward(
            call.query_rows(tensors[2 * call.pair]),
            call.key_rows(tensors[2 * call.pair + 1], share),
            call.key_rows(value, share),
            **_settings(call, scaling),
        )
        out, sums = call.query_back(out, 0.0), call.query_back(sums, -torch.inf)
        if first is None:
            if out.shape == query.shape:  # the first call of all queries and heads needs nothing to be joined to
                first = (out, sums)
                continue
            first = out.new_zeros(query.shape), sums.new_full(query.shape[:3], -torch.inf)
        _join(call.part(first[0], 1, call.queries), call.part(first[1], 1, call.queries), out, sums)
    assert first is not None, "no calls"
    return first


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
