"""The ways of computing attention that `backends` chooses from, each by its kernel, for the segments that it takes.

The part of a call that a kernel cannot compute, because of the mask or the positions, is computed by the formula in
blocks and added to the kernel's output: no query is in both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_posswap.kernels.calls import attend as attend_calls
from hf_posswap.kernels.calls import numbered_anew
from hf_posswap.kernels.distance_bias import attend_by_distance, seen_distances
from hf_posswap.kernels.flex import attend_read
from hf_posswap.kernels.fused import bias_dtype
from hf_posswap.kernels.made_bias import attend_made
from hf_posswap.kernels.merge import region_calls
from hf_posswap.kernels.piecewise_bias import PiecewiseBlocks, attend_piecewise, piecewise_blocks
from hf_posswap.kernels.row_bias import attend_linear, linear_calls
from hf_posswap.kernels.segments import Segment
from hf_posswap.patching.sites.attention.request import Division, Request
from hf_posswap.patching.sites.attention.split_attention import attend_split
from hf_posswap.schemes.common.piece import Piece
from hf_posswap.utils.devices import as_attended

Pieces = Callable[[], tuple[Piece, ...]]


def _row(request: Request, pieces: Pieces) -> Tensor:
    division, slopes = _division(request, "row"), request.mechanism.slopes
    assert slopes is not None
    dtype = bias_dtype(request.query.dtype)

    def make() -> Any:
        return linear_calls(slopes.to(request.query.device, dtype), division.fast, request.share)

    calls = request.shared(("row calls", id(division), dtype, request.share), make)
    tensors = [(request.query, request.key)], request.value
    return _add_biased(request, attend_calls(*tensors, calls, scaling=request.scaling), division.rest)


def _row_windowed(request: Request, pieces: Pieces) -> Tensor:
    division, slopes = _division(request, "row_windowed"), request.mechanism.slopes
    assert slopes is not None
    out = attend_linear(
        request.query, request.key, request.value, slopes, scaling=request.scaling, windowed=True,
        segments=division.fast,
    )  # fmt: skip
    return _add_biased(request, out, division.rest)


def _hankel(request: Request, pieces: Pieces) -> Tensor:
    division = _division(request, "hankel")
    least, most = seen_distances(division.fast)
    line = request.mechanism.distance_bias(torch.arange(least, most + 1, device=request.query.device))  # [H, N]
    out = attend_by_distance(
        request.query, request.key, request.value, line, scaling=request.scaling, segments=division.fast
    )  # fmt: skip
    return _add_biased(request, out, division.rest)


def _flex(request: Request, pieces: Pieces) -> Tensor:
    bias = request.read()
    assert bias is not None
    return attend_read(
        request.query, request.key, request.value, bias, scaling=request.scaling, causal=request.causal
    )  # fmt: skip


def _chunked(request: Request, pieces: Pieces) -> Tensor:
    division = request.division("chunked") if request.mechanism.piecewise else None
    if division is not None:
        known, tensors = division, (request.query, request.key, request.value)

        def make() -> PiecewiseBlocks:
            return piecewise_blocks(request.query, request.key, request.mechanism.piecewise_bias, known.fast)

        key = "piecewise", id(division), request.query.dtype, request.share
        blocks = make() if torch.is_grad_enabled() else request.shared(key, make)
        out = attend_piecewise(*tensors, blocks, scaling=request.scaling)
        return _add_biased(request, out, division.rest)
    layout = request.layout
    return _biased(request, None if layout is None else (*layout.regular, *layout.irregular))


def _merge(request: Request, pieces: Pieces) -> Tensor:
    division = _division(request, "merge")
    regions: tuple[Any, ...] | None = request.mechanism.regions
    all_pieces, by_query = pieces(), request.mechanism.splits_queries
    if by_query:
        regions = tuple(piece.pairs for piece in all_pieces)
    assert regions is not None
    numbers, calls = request.shared(
        ("merge calls", id(division)), lambda: numbered_anew(region_calls(regions, division.fast))
    )
    queries, keys, value = request.query.shape[2], request.key.shape[2], as_attended(request.value)
    turned: dict[Any, Tensor] = {}  # regions may share their keys
    pairs: list[tuple[Tensor, Tensor]] = []
    out: Tensor | None = None
    for index, piece in enumerate(all_pieces[number] for number in numbers):
        if piece.key_identity not in turned:
            turned[piece.key_identity] = as_attended(piece.rotate_key(request.key, 0, keys))
        pair = as_attended(piece.rotate_query(request.query, 0, queries)), turned[piece.key_identity]
        if by_query:  # no query is in two pieces, so nothing is joined, and no more than one rotation is held
            own = tuple(dataclasses.replace(call, pair=0) for call in calls if call.pair == index)
            part = attend_calls([pair], value, own, scaling=request.scaling)
            out = part if out is None else out + part
            turned.clear()
        else:
            pairs.append(pair)
    if out is None:
        out = attend_calls(pairs, value, calls, scaling=request.scaling)
    for segment in division.rest:
        out = _with_split(request, out, segment, all_pieces)
    return out


def _division(request: Request, name: str) -> Division:
    division = request.division(name)
    assert division is not None, "chosen without being asked"
    return division


def _add_biased(request: Request, out: Tensor, rest: Sequence[Segment]) -> Tensor:
    """Return `out` [B, H, Q, D], zero for the queries of `rest`, with their attention under the bias added."""
    return out + _biased(request, rest) if rest else out


def _biased(request: Request, segments: Sequence[Segment] | None) -> Tensor:
    span, mechanism = request.span, request.mechanism
    of_queries, of_keys = span.query, span.key

    def make(rows: slice, queries: slice, keys: slice) -> Tensor:
        return mechanism.bias(_rows(of_queries, rows)[:, queries], _rows(of_keys, rows)[:, keys])

    return attend_made(
        request.query, request.key, request.value, make, tuple(mechanism.parameters()), request.mask,
        scaling=request.scaling, causal=request.causal, segments=segments,
    )  # fmt: skip


def _with_split(request: Request, total: Tensor, segment: Segment, pieces: Sequence[Piece]) -> Tensor:
    """Return `total` [B, H, Q, D], zeros for the queries of `segment`, with their attention by regions added."""
    rows, queries, keys = (slice(*span) for span in (segment.rows, segment.queries, segment.keys))
    out, _ = attend_split(
        request.query[rows, :, queries],
        request.key[rows, :, keys],
        request.value[rows, :, keys],
        tuple(piece.part(rows, queries, keys) for piece in pieces),
        _rows(request.span.query, rows)[:, queries],
        _rows(request.span.key, rows)[:, keys],
        None if request.mask is None else _rows(request.mask, rows)[..., queries, keys],
        causal=request.causal,
        scaling=request.scaling,
    )
    whole = total.clone()
    whole[rows, :, queries] = out.transpose(1, 2)
    return whole


def _rows(x: Tensor, rows: slice) -> Tensor:
    """Return `rows` of `x` [B or 1, ...], which all rows may share."""
    return x if len(x) == 1 else x[rows]


WAYS: dict[str, Callable[[Request, Pieces], Tensor]] = {
    "row": _row,
    "row_windowed": _row_windowed,
    "hankel": _hankel,
    "flex": _flex,
    "chunked": _chunked,
    "merge": _merge,
}
