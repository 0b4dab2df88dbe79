"""Attention over a paged cache by the scheme's own functions: of each request, from its gathered keys and values.

An inference engine keeps the keys and values of all texts in blocks of one cache, and its kernels compute the scores.
Where a scheme rotates near and far keys differently, or adds a bias that is not a line of the distance, they cannot.
Here the blocks of one request after another are gathered, and the functions that attend in transformers attend: a
request alone is an ordinary text, whatever else is in the batch and however much of it was read before.

Memory: the keys and values of one layer and one request, once for each rotation of the scheme, and the scores of a
block of queries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hf_posswap.kernels.segments import Segment
from hf_posswap.patching.sites.attention import backends
from hf_posswap.patching.sites.attention.backends import Layout, Request
from hf_posswap.patching.sites.attention.call import AttentionCall
from hf_posswap.patching.sites.attention.forward_memo import ForwardMemo, Span
from hf_posswap.patching.sites.attention.function import additive_mask
from hf_posswap.patching.sites.attention.split_attention import attend_split, grouped_matmul
from hf_posswap.schemes.common.piece import Keys
from hf_posswap.schemes.mechanism import Mechanism

MOST_SCORES = 2**24
"""Scores of all heads that are held at once, 64 MiB in float32, unless those of one query are more."""
MOST_QUERIES = 256
"""Queries that are scored at once."""


class LayerSettings(NamedTuple):
    """What a layer does to its scores.

    Attributes:
        scaling: multiplies them.
        window: the most keys that a query sees; None: all.
        softcap: limits scaled scores to it by tanh, before a bias is added; None: no limit.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None


def stored_form(mechanism: Mechanism) -> Keys:
    """Return the form in which a paged cache stores the keys of `mechanism`: rotated where one rotation is fixed."""
    if mechanism.rotates:
        return "rotated"
    return "far" if mechanism.turns_on else "raw"


def stored_keys(call: AttentionCall, key: Tensor) -> Tensor:
    """Return the new keys `key` [B, G, T, D], after `call.rotate`, as a paged cache stores them."""
    if stored_form(call.mechanism) == "far":
        return call.mechanism.rotate_far(key, call.rotation())
    return key


@dataclass(frozen=True)
class PagedRequest:
    """The new tokens of one request, and the keys that they may see.

    Attributes:
        rows: of its new tokens in the batch.
        blocks: the blocks of the cache that hold the keys, in their order.
        offset: the place of the first key in the first block.
        span: where the new tokens and the keys stand.
        layout: which keys each token sees.
    """

    rows: slice
    blocks: Tensor
    offset: int
    span: Span
    layout: Layout

    @property
    def segment(self) -> Segment:
        """Which keys each token sees."""
        return self.layout.regular[0]

    def gather(self, states: Tensor) -> Tensor:
        """Return the request's keys or values [1, G, K, D] from a cache of them, [blocks, G, tokens of a block, D]."""
        gathered = states.transpose(0, 1).index_select(1, self.blocks).flatten(1, 2)
        return gathered[None, :, self.offset : self.offset + self.span.key_length]


@dataclass
class PagedBatch:
    """The requests of one forward, and what its layers share.

    Attributes:
        starts: the first new token of each request in the batch, and the number of new tokens in all.
        lengths: tokens of each request, the new ones included.
        block_table: the blocks of each request's tokens, [requests, blocks].
        slots: where the cache stores each new token: block times tokens of a block, plus its place there, [T].
    """

    starts: Sequence[int]
    lengths: Sequence[int]
    block_table: Tensor
    slots: Tensor
    known: dict[tuple[int | None, int], list[PagedRequest]] = field(default_factory=dict)

    def requests(self, window: int | None, block_size: int) -> list[PagedRequest]:
        """Return the requests that have new tokens, for layers with the sliding window `window`, made once."""
        if (window, block_size) not in self.known:
            self.known[window, block_size] = [
                self._request(number, window, block_size)
                for number in range(len(self.lengths))
                if self.starts[number + 1] > self.starts[number]
            ]
        return self.known[window, block_size]

    def _request(self, number: int, window: int | None, block_size: int) -> PagedRequest:
        rows, length = slice(self.starts[number], self.starts[number + 1]), self.lengths[number]
        past = length - (rows.stop - rows.start)
        first = 0 if window is None else max(0, past - window + 1)
        blocks = self.block_table[number, first // block_size : -(-length // block_size)].long()
        device = self.block_table.device
        query, key = torch.arange(past, length, device=device)[None], torch.arange(first, length, device=device)[None]
        span = Span(query, length - first, past == 0 and window is None, key, shared_cache={})
        apart = past - first
        segment = Segment(
            (0, 1), (0, length - past), (0, length - first),
            first=None if window is None else apart - window + 1, last=apart, apart=apart, start=first,
        )  # fmt: skip
        return PagedRequest(rows, blocks, first % block_size, span, Layout((segment,), ()))


def write_keys(cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Store keys [T, G, D] and values [T, G, D] in `cache` [blocks, G, tokens of a block, 2 D] at `slots` [T]."""
    size = cache.shape[2]
    cache[slots // size, :, slots % size] = torch.cat((key, value), dim=-1).to(cache.dtype)


def attend_paged(
    batch: PagedBatch, mechanism: Mechanism, query: Tensor, cache: Tensor, out: Tensor, settings: LayerSettings
) -> None:
    """Compute the attention of a layer for all requests of a batch, whose new keys are in the cache already.

    Args:
        batch: the requests.
        mechanism: of the layer.
        query: [T, H, D], rotated where the mechanism rotates all queries alike.
        cache: keys as `stored_keys` gives them, and behind each its value, [blocks, G, tokens of a block, 2 D].
        out: takes the output, [T, H, D].
        settings: of the layer.
    """
    width = query.shape[-1]
    for request in batch.requests(settings.window, cache.shape[2]):
        key, value = request.gather(cache[..., :width]), request.gather(cache[..., width:])
        rows = query[request.rows].transpose(0, 1)[None]  # [1, H, q, D]
        out[request.rows] = attend_request(request, mechanism, rows, key, value, settings)[0]


def attend_request(
    request: PagedRequest, mechanism: Mechanism, query: Tensor, key: Tensor, value: Tensor, settings: LayerSettings
) -> Tensor:
    """Return the attention of one request, [1, q, H, D].

    Args:
        request: the request.
        mechanism: of the layer.
        query: [1, H, q, D].
        key: [1, G, K, D], as `stored_keys` gave them.
        value: [1, G, K, D].
        settings: of the layer.
    """
    call = AttentionCall(mechanism, request.span, ForwardMemo(in_forward=True), stored_form(mechanism))
    arguments = {"is_causal": True, "scaling": settings.scaling, "softcap": settings.softcap}
    of_segment = call.request(None, "sdpa", query, key, value, None, arguments)
    of_segment = dataclasses.replace(of_segment, find_layout=lambda: request.layout)
    attended = backends.attend(of_segment, call.pieces)
    return _by_formula(call, of_segment, request.segment, settings) if attended is None else attended


def _by_formula(call: AttentionCall, request: Request, segment: Segment, settings: LayerSettings) -> Tensor:
    """Return attention [1, q, H, D] in blocks of queries."""
    _, heads, length, _ = request.query.shape
    step = max(1, min(MOST_QUERIES, MOST_SCORES // (heads * request.key.shape[2])))
    attend = _split_block if call.mechanism.splits else _biased_block
    parts = []
    for start in range(0, length, step):
        stop = min(start + step, length)
        low, high = segment.seen_by(start, stop - 1)
        parts.append(attend(call, request, slice(start, stop), slice(low, high), settings))
    return torch.cat(parts, dim=1)


def _shown(call: AttentionCall, queries: slice, keys: slice, settings: LayerSettings) -> Tensor | None:
    """Return which keys a block of queries sees, [1, 1, q, k]; None: one query, which sees all that are gathered."""
    if queries.stop - queries.start == 1:
        return None
    apart = call.span.query[:, queries, None] - call.span.key[:, None, keys]
    shown = apart >= 0
    return (shown if settings.window is None else shown & (apart < settings.window))[:, None]


def _split_block(call: AttentionCall, request: Request, queries: slice, keys: slice, settings: LayerSettings) -> Tensor:
    """Return attention [1, q, H, D] of a block of queries whose scores come from several rotations."""
    pieces, memo = call.pieces(), None
    if request.query.shape[2] == 1:
        memo = call.kept_keys()
    else:
        pieces = tuple(piece.part(slice(None), queries, keys) for piece in pieces)
    attended, _ = attend_split(
        request.query[:, :, queries], request.key[:, :, keys], request.value[:, :, keys], pieces,
        call.span.query[:, queries], call.span.key[:, keys], _shown(call, queries, keys, settings),
        causal=False, scaling=settings.scaling, memo=memo,
    )  # fmt: skip
    return attended


def _biased_block(
    call: AttentionCall, request: Request, queries: slice, keys: slice, settings: LayerSettings
) -> Tensor:
    """Return attention [1, q, H, D] of a block of queries with the scheme's bias on their scores."""
    query, key, value = request.query[:, :, queries], request.key[:, :, keys], request.value[:, :, keys]
    if request.query.shape[2] == 1:
        bias = call.bias()
        assert bias is not None, "a mechanism that is computed here splits or biases"
    else:
        bias = call.mechanism.bias(call.span.query[:, queries], call.span.key[:, keys])
    added = additive_mask(bias, _shown(call, queries, keys, settings), causal=False, query=query, key=key)
    if settings.softcap is None:
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=added, scale=settings.scaling, enable_gqa=request.share > 1
        )
        return attended.transpose(1, 2)
    scores = grouped_matmul(query, key.transpose(-1, -2)).float() * settings.scaling
    scores = settings.softcap * torch.tanh(scores / settings.softcap) + added
    return grouped_matmul(scores.softmax(dim=-1).to(query.dtype), value).transpose(1, 2)
