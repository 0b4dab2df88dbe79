"""Which backend computes the attention of a scheme: what each can take of a call, and how one is chosen.

The part of a call that a kernel cannot compute, because of the mask or the positions, is computed by the formula in
blocks and added to the kernel's output: no query is in both.

All give the same numbers, but for rounding, and but for padding that sees nothing: the formula gives it a mean of all
values, the others zeros, as stock eager and stock sdpa do. "plain" is the formula under the model's own implementation,
and works everywhere; the others hold nothing of [Q, K], and are taken where they apply and the input is long enough to
gain.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hf_posswap.compat.torch_tensors import holds_values, is_fake, transforms_active
from hf_posswap.errors import NotPatchedError, OptionError, UnsupportedSwapError
from hf_posswap.geometry import Geometry
from hf_posswap.kernels import fused
from hf_posswap.kernels.blockwise import attend_by_distance, attend_made, by_line, seen_distances
from hf_posswap.kernels.calls import attend as attend_calls
from hf_posswap.kernels.calls import numbered_anew
from hf_posswap.kernels.flex import (
    CHUNK_REGIONS,
    MASKED_REGIONS,
    REGIONS,
    SETTLED,
    ByDistance,
    NotCompiledError,
    Penalty,
    attend_by_regions,
    attend_read,
    attend_settled,
    fits_flex,
    fits_joined,
    past_blocks,
    shown_blocks,
)
from hf_posswap.kernels.fused import bias_dtype
from hf_posswap.kernels.merge import mergeable, region_calls
from hf_posswap.kernels.piecewise_bias import PiecewiseBlocks, attend_piecewise, piecewise_blocks
from hf_posswap.kernels.row_bias import Windows, linear_calls, skipped, windows_of
from hf_posswap.kernels.segments import Segment, placed, segments_of, together, whole
from hf_posswap.patching.sites.attention.forward_memo import ForwardMemo, Span
from hf_posswap.patching.sites.attention.split_attention import attend_split
from hf_posswap.schemes.base import Scheme
from hf_posswap.schemes.common.piece import Piece
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.utils.devices import as_attended, device_type, is_capturing

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

ALTERING = ("softcap", "s_aux", "position_bias", "head_mask", "score_mod", "cache", "output_attentions")
"""Arguments of an attention function that ask for what the kernels do not do."""
MOST_REST = 1 / 3
"""Pairs of a query and a key that a way cannot take, over those that it can, up to which "auto" takes it."""
Pieces = Callable[[], tuple[Piece, ...]]
BACKENDS = {
    "row": "the bias as one number a key, in a fused kernel",
    "row_windowed": "the same, without the keys whose weight float32 cannot hold",
    "hankel": "the bias as one number a distance, in blocks of queries",
    "flex": "the bias, or the region, read from positions in compiled flex_attention",
    "chunked": "the bias made for a few queries at a time",
    "merge": "fused calls, joined by their softmax sums",
    "plain": "the scores as the formula has them",
}
SITUATIONS = "padded, packed or upon a cache too, unless masks have gaps or positions jump"
"""Where the first way of a scheme applies, in the words of a plan."""
MIN_QK_PAIRS = 2**18
"""Pairs of a query and a key in a row of the batch (512 x 512) from which "auto" leaves the plain way."""
MIN_WINDOWED_KEYS = 1024
"""Keys from which "auto" asks whether steep heads can leave out far ones."""
LEAST_SKIPPED = 1 / 3
"""Share of all heads' keys from which "auto" leaves them out: it takes more calls."""
MIN_FLEX_QK_PAIRS = 2**22
"""Pairs (2048 x 2048) from which "auto" takes flex on a GPU, which takes long to compile, and reads a mask there."""
LEAST_SETTLED = 8
"""Tokens over the distance from which a bias stays the same, from which flex attends to near and far keys apart."""
LARGE_BIAS = 2**24
"""Numbers of a dense bias, 64 MiB, from which "auto" makes it in parts where only "chunked" applies."""
MOST_CALLS = 64
"""Chunks of a sequence up to which "auto" merges: each needs a call."""


class Layout(NamedTuple):
    """What is seen, as segments, in places where positions rise by one along queries and keys, and elsewhere."""

    regular: tuple[Segment, ...]
    irregular: tuple[Segment, ...]


class Division(NamedTuple):
    """The segments that a way takes, and those that are left to the formula."""

    fast: tuple[Segment, ...]
    rest: tuple[Segment, ...]

    @property
    def gains(self) -> bool:
        """Whether few pairs are left compared with those taken."""
        return _pairs(self.rest) <= MOST_REST * _pairs(self.fast)


class RegionBlocks(NamedTuple):
    """The numbers of the regions that hold any pair, and the pairs of each as flex_attention takes them."""

    numbers: tuple[int, ...]
    blocks: tuple[BlockMask, ...]


@dataclass(frozen=True)
class Request:
    """One attention call, after rotation.

    Attributes:
        mechanism: of the layer.
        span: where queries and keys stand.
        query: [B, H, Q, D].
        key: [B, G, K, D].
        value: [B, G, K, Dv].
        mask: bool or additive, [B or 1, 1 or H, Q, K]; None: none but causality.
        causal: whether a left-out mask means causal.
        implementation: that the model's config names.
        arguments: what else the attention module passed.
        read: gives the bias as flex_attention may read it, or None; asked at the end.
        find_layout: gives what is seen, or None where segments do not tell it; asked at the end.
        find_shown: gives the mask as flex_attention takes it, where there is one that it takes; asked at the end.
        shared: gives what a function makes for a key, once for all layers that stand alike.
        regions_once: gives what a function makes of the regions, once for all layers that stand alike under the mask.
    """

    mechanism: Mechanism
    span: Span
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    causal: bool
    implementation: str | None
    arguments: dict[str, Any]
    read: Callable[[], Penalty | ByDistance | None]
    find_layout: Callable[[], Layout | None]
    find_shown: Callable[[], BlockMask]
    shared: Callable[[Any, Callable[[], Any]], Any]
    regions_once: Callable[[Callable[[], RegionBlocks]], RegionBlocks]

    @property
    def scaling(self) -> float:
        """What multiplies the scores."""
        given = self.arguments.get("scaling")
        return self.query.shape[-1] ** -0.5 if given is None else float(given)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key in one row of the batch."""
        return self.query.shape[2] * self.key.shape[2]

    @property
    def share(self) -> int:
        """Heads that share a key, H/G."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def alters(self) -> bool:
        """Whether something is asked for that only the model's own implementation does."""
        if self.implementation != "sdpa" or self.arguments.get("dropout"):
            return True
        altering = (self.arguments.get(name) for name in ALTERING)
        return any(value is not None and value is not False for value in altering)

    def is_plain(self) -> bool:
        """Return whether only the plain way is open, whatever the scheme."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or self._is_opaque():
            return True
        if transforms_active():  # torch.func differentiates the formula, not its kernels
            return True
        if self.alters or self.query.shape[2] == 1 or is_capturing():
            return True
        learned_mask = isinstance(self.mask, Tensor) and self.mask.requires_grad
        one_key = self.key[..., : self.query.shape[-1]] if self.mechanism.keys_per_token > 1 else self.key
        if learned_mask:
            return True
        one_way = self.mechanism.biases and device_type(self.query) == "cuda"  # flex, which is tried by itself
        return not one_way and not fused.fits(self.query, one_key, self.value)

    def _is_opaque(self) -> bool:
        """Return whether the tensors are of a class of their own, or stand at places that cannot be read."""
        if type(self.query) is Tensor:
            return False
        return not (is_fake(self.query) and holds_values(self.span.query))

    @functools.cached_property
    def layout(self) -> Layout | None:
        """What is seen; None: segments do not tell it."""
        return self.find_layout()

    def division(self, name: str) -> Division | None:
        """Return the segments that the backend `name` computes; None: it computes none."""
        layout = self.layout
        if layout is None:
            return None
        (division,) = self.shared(("division", name, id(layout)), lambda: (_divided(name, layout),))
        return division


def _divided(name: str, layout: Layout) -> Division | None:
    longest = sum(_pairs_of(segment.queries) + _pairs_of(segment.keys) for segment in layout.regular)
    # no distances as long as a jump of positions
    fast = [
        segment for segment in layout.regular if -longest <= segment.distances[0] and segment.distances[1] <= longest
    ]
    if name == "hankel":
        fast = [segment for segment, on_line in zip(fast, by_line(fast), strict=True) if on_line]
    elif name not in ("merge", "chunked"):
        fast = [segment for segment in fast if segment.distances[0] >= 0]
    rest = [segment for segment in (*layout.regular, *layout.irregular) if segment not in fast]
    return Division(tuple(fast), tuple(rest)) if fast else None


def _pairs_of(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _pairs(segments: tuple[Segment, ...]) -> int:
    return sum(_pairs_of(segment.rows) * _pairs_of(segment.queries) * _pairs_of(segment.keys) for segment in segments)


def seen_segments(
    query: Tensor, keys: int, mask: Tensor | None, memo: ForwardMemo, *, causal: bool
) -> tuple[Segment, ...] | None:
    """Return what `query` [B, H, Q, D] sees of `keys` keys, without positions; None: that is not told by segments.

    A mask is looked at once in a forward, for all layers that are given it.
    """
    batch, _, length, _ = query.shape
    if mask is None:
        return whole(batch, length, min(length, keys) if causal else keys, causal=causal)  # as stock: from the first
    if not isinstance(mask, Tensor) or not holds_values(mask):
        return None
    if device_type(mask) != "cpu" and (mask.dtype != torch.bool or length * keys < MIN_FLEX_QK_PAIRS):
        return None  # to wait for it would cost more than it saves
    return memo.of_mask(mask, "segments", lambda: segments_of(mask, batch, keys))


def lay_out(seen: tuple[Segment, ...], span: Span) -> Layout:
    """Return the segments of a mask with the positions of the queries and keys."""
    of_queries = span.query.cpu()
    of_keys = of_queries if span.is_prefill else span.key.cpu()
    pieces_placed = [piece for segment in seen for piece in placed(segment, of_queries, of_keys)]
    regular = together([piece for piece, rises in pieces_placed if rises])
    return Layout(tuple(regular), tuple(piece for piece, rises in pieces_placed if not rises))


def _row_windowed(request: Request, pieces: Pieces) -> Tensor:
    division, slopes = _division(request, "row_windowed"), request.mechanism.slopes
    assert slopes is not None
    windows = windows_of(request.query, request.key, slopes, division.fast, request.scaling)
    gains = request.mechanism.backend == "row_windowed" or skipped(windows, division.fast) >= LEAST_SKIPPED
    return _row_within(request, division, windows if gains else None)


def _row_within(request: Request, division: Division, windows: Windows | None) -> Tensor:
    dtype, slopes = bias_dtype(request.query.dtype), request.mechanism.slopes
    assert slopes is not None
    tensors = [(request.query, request.key)], request.value
    with_gradients = torch.is_grad_enabled() and any(
        x.requires_grad for x in (request.query, request.key, request.value)
    )
    calls = request.shared(
        ("row calls", id(division), dtype, windows, with_gradients),
        lambda: linear_calls(
            slopes.to(request.query.device, dtype), division.fast, windows, with_gradients=with_gradients
        ),
    )
    return _add_biased(request, attend_calls(*tensors, calls, scaling=request.scaling), division.rest)


def _hankel(request: Request, pieces: Pieces) -> Tensor:
    division = _division(request, "hankel")
    least, most = seen_distances(division.fast)
    line = request.mechanism.distance_bias(torch.arange(least, most + 1, device=request.query.device))  # [H, N]
    out = attend_by_distance(
        request.query, request.key, request.value, line, scaling=request.scaling, segments=division.fast
    )  # fmt: skip
    return _add_biased(request, out, division.rest)


def _flex(request: Request, pieces: Pieces) -> Tensor:
    if request.mechanism.splits:
        numbers, blocks = request.regions_once(lambda: _region_blocks(request))
        pairs = _turned(request, [pieces()[number] for number in numbers])
        (value,) = as_attended(request.value)
        return attend_by_regions(_regions_kernel(request), pairs, value, blocks, scaling=request.scaling)
    settled = request.mechanism.settles_at
    if settled is not None and _settles(request, settled):
        line = request.mechanism.distance_bias(torch.arange(settled + 1, device=request.query.device))  # [H, N]
        return attend_settled(request.query, request.key, request.value, line, scaling=request.scaling)
    bias = request.read()
    assert bias is not None
    return attend_read(
        request.query, request.key, request.value, bias, scaling=request.scaling, causal=request.causal,
        shown=None if request.mask is None else request.find_shown(),
    )  # fmt: skip


def _regions_kernel(request: Request) -> str:
    if request.mask is not None:
        return MASKED_REGIONS
    return CHUNK_REGIONS if any(region.size > 1 for region in request.mechanism.regions or ()) else REGIONS


def _region_blocks(request: Request) -> RegionBlocks:
    """Return the regions that hold any pair, and the pairs of each."""
    layout, rows, columns = request.layout, request.span.query, request.span.key
    segments = None if layout is None else (*layout.regular, *layout.irregular)
    is_past = segments is not None and all(segment.distances[0] >= 0 for segment in segments)
    regions = {n: region for n, region in enumerate(request.mechanism.regions or ())
               if not (is_past and region.is_ahead)}  # fmt: skip
    if request.mask is not None:
        shown = request.mask[..., : request.key.shape[2]]
        masks = (shown & region.holds(rows[:, None, :, None], columns[:, None, None]) for region in regions.values())
        return RegionBlocks(tuple(regions), tuple(map(shown_blocks, masks)))
    assert segments is not None, "chosen without being asked"
    length, device, start = request.query.shape[2], request.query.device, segments[0].start
    blocks = (
        past_blocks(length, length, device, max(region.low or 0, 0), region.high, size=region.size,
                    start=0 if region.size == 1 else start)
        for region in regions.values()
    )  # fmt: skip
    return RegionBlocks(tuple(regions), tuple(blocks))


def _is_one_text(request: Request) -> bool:
    """Return whether queries and keys are one whole text, seen causally, whose positions rise by one."""
    length, keys, layout = request.query.shape[2], request.key.shape[2], request.layout
    if length != keys or not request.causal or layout is None or layout.irregular or len(layout.regular) != 1:
        return False
    (text,) = whole(request.query.shape[0], length, keys, causal=True)
    return layout.regular[0]._replace(start=0) == text


def _settles(request: Request, distance: int) -> bool:
    """Return whether most keys of one whole text are at `distance` and more, where the bias is one number, on a GPU."""
    if request.query.shape[2] < LEAST_SETTLED * distance or not _is_one_text(request):
        return False
    return fits_joined(SETTLED, request.query, request.key, request.value, learned=is_learned(request.mechanism))


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
    (value,), used_pieces = as_attended(request.value), [all_pieces[number] for number in numbers]
    if by_query:  # no query is in two pieces, so nothing is joined, and no more than one rotation is held
        outputs = (
            attend_calls(
                _turned(request, [piece]),
                value,
                tuple(dataclasses.replace(call, pair=0) for call in calls if call.pair == number),
                scaling=request.scaling,
            )
            for number, piece in enumerate(used_pieces)
        )
        out = functools.reduce(torch.add, outputs)
    else:
        out = attend_calls(_turned(request, used_pieces), value, calls, scaling=request.scaling)
    for segment in division.rest:
        out = _with_split(request, out, segment, all_pieces)
    return out


def _turned(request: Request, pieces: Sequence[Piece]) -> list[tuple[Tensor, Tensor]]:
    """Return query [B, H, Q, D] and key [B, G, K, D], rotated for each piece; pieces may share their keys."""
    queries, keys = request.query.shape[2], request.key.shape[2]
    turned: dict[object, Tensor] = {}
    pairs = []
    for piece in pieces:
        if piece.key_identity not in turned:
            (turned[piece.key_identity],) = as_attended(piece.rotate_key(request.key, 0, keys))
        (query,) = as_attended(piece.rotate_query(request.query, 0, queries))
        pairs.append((query, turned[piece.key_identity]))
    return pairs


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
    given = dict(mechanism.named_parameters())

    def make(rows: slice, queries: slice, keys: slice) -> Tensor:
        positions = _rows(of_queries, rows)[:, queries], _rows(of_keys, rows)[:, keys]
        if all(now is before for now, before in zip(mechanism.parameters(), given.values(), strict=True)):
            return mechanism.bias(*positions)
        holder: Any = nn.Module()  # in the backward of a functional call, whose parameters the module has no more
        holder.mechanism, holder.forward = mechanism, mechanism.bias
        bias: Tensor = functional_call(holder, {f"mechanism.{name}": value for name, value in given.items()}, positions)
        return bias

    return attend_made(
        request.query, request.key, request.value, make, tuple(given.values()), request.mask,
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
    "row": lambda request, pieces: _row_within(request, _division(request, "row"), None),
    "row_windowed": _row_windowed,
    "hankel": _hankel,
    "flex": _flex,
    "chunked": _chunked,
    "merge": _merge,
}


def backends_of(mechanism: Mechanism) -> tuple[str, ...]:
    """Return the names of the ways that a mechanism may be computed in, the fastest first; none: as any attention.

    Example:
        >>> from hf_posswap.schemes.alibi import AlibiMechanism
        >>> backends_of(AlibiMechanism([0.25, 0.0625], interpolation=1.0))
        ('row_windowed', 'row', 'hankel', 'flex', 'chunked', 'plain')
    """
    if mechanism.splits:
        if mechanism.splits_queries:
            return ("merge", "plain")
        known = mechanism.regions is not None and mergeable(mechanism.regions)
        return ("merge", "flex", "plain") if known else ("plain",)
    if not mechanism.biases:
        return ()
    rows = ("row_windowed", "row") if mechanism.learns_slopes or mechanism.slopes is not None else ()
    return (*rows, *(("hankel", "flex") if mechanism.distance_only else ()), "chunked", "plain")


def choose(request: Request) -> str:
    """Return the name of the way to compute `request`: "plain" where no other one applies."""
    wanted, open_to = request.mechanism.backend, backends_of(request.mechanism)
    if wanted == "plain" or len(open_to) < 2 or request.is_plain():
        return "plain"
    names = [name for name in open_to if wanted in ("auto", name)]  # layers differ in what they are open to
    return next((name for name in names if _gains(name, request, wanted) and _applies(name, request)), "plain")


ON_GPU = ("flex", "merge")
"""The backends of a GPU, whose fused calls take no bias, and the formula."""


def gains_on_gpu(request: Request) -> bool:
    """Return whether a text is long enough on a GPU for another way than the formula, if one applies."""
    open_to, wanted = [name for name in backends_of(request.mechanism) if name in ON_GPU], request.mechanism.backend
    if wanted != "auto" or not open_to:
        return wanted in open_to
    return request.pairs >= (MIN_FLEX_QK_PAIRS if open_to == ["flex"] else MIN_QK_PAIRS)


def _gains(name: str, request: Request, wanted: str) -> bool:
    """Return whether "auto" takes `name` at this size; a way that was asked for is taken at any."""
    if wanted != "auto" or name == "plain":
        return True
    if request.pairs < MIN_QK_PAIRS:
        return False
    if name == "row_windowed":
        return request.key.shape[2] >= MIN_WINDOWED_KEYS and not is_fake(request.query)
    if name == "flex":  # regions are compiled for those who ask: merged calls need no compiling
        is_wanted = not request.mechanism.splits and device_type(request.query) == "cuda"
        return is_wanted and request.pairs >= MIN_FLEX_QK_PAIRS
    if name == "chunked" and request.mechanism.distance_only:  # else the bias is a network's, with more inside
        return request.query.shape[0] * request.query.shape[1] * request.pairs >= LARGE_BIAS
    if name == "merge" and not request.mechanism.splits_queries:
        assert request.mechanism.regions is not None
        return all(region.size == 1 or request.pairs <= (MOST_CALLS * region.size) ** 2
                   for region in request.mechanism.regions)  # fmt: skip
    return True


def _applies(name: str, request: Request) -> bool:
    """Return whether `name` is exact for this mask and these positions."""
    if device_type(request.query) != "cpu" and name not in (*ON_GPU, "plain"):
        return False
    if name in ("chunked", "plain"):
        return True
    if name in ("row", "row_windowed") and request.mechanism.learns_slopes and is_learned(request.mechanism):
        return False  # the fused calls give the numbers of keys no gradient
    if name == "flex":
        masked = request.mask is not None
        if request.mechanism.splits:
            known = _flex_reads(request) if masked else _is_one_text(request)
            return known and fits_joined(_regions_kernel(request), request.query, request.key, request.value)
        if not (_flex_reads(request) if masked else request.span.is_prefill):
            return False
        settled = request.mechanism.settles_at
        apart = settled is not None and _settles(request, settled)
        return apart or fits_flex(request.query, request.value, request.read(), masked=masked)
    division = request.division(name)
    if division is None:
        return False
    return division.gains or request.mechanism.backend == name


def _flex_reads(request: Request) -> bool:
    """Return whether the mask says of each query and key, for all heads alike, whether it sees it and no more."""
    mask = request.mask
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 4:
        return False
    rows, queries = len(request.query), request.query.shape[2]
    return len(mask) in (1, rows) and mask.shape[1:3] == (1, queries) and mask.shape[3] >= request.key.shape[2]


def attend(request: Request, pieces: Callable[[], tuple[Piece, ...]]) -> Tensor | None:
    """Return attention [B, Q, H, D], computed by the backend that `choose` names; None: by the plain one, the caller's.

    Args:
        request: the call.
        pieces: gives those of a mechanism that splits.
    """
    while (name := choose(request)) != "plain":
        with suppress(NotCompiledError):  # it is not chosen again
            return WAYS[name](request, pieces).transpose(1, 2).contiguous()
    return None


def is_learned(mechanism: Mechanism) -> bool:
    """Return whether gradients of the mechanism's own parameters are wanted now."""
    return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in mechanism.parameters())


def flex_bias(mechanism: Mechanism, span: Span, batch: int) -> Penalty | ByDistance | None:
    """Return what flex_attention adds to its scores, for `batch` rows; any mask, any positions.

    None: the mechanism adds nothing, or needs the bias as a tensor, as it is not a function of distance.
    """
    positions = span.query.expand(batch, -1), span.key.expand(batch, -1)
    slopes = mechanism.slopes
    if slopes is not None and not (mechanism.learns_slopes and is_learned(mechanism)):
        return Penalty(slopes.to(span.query.device), *positions)
    if not mechanism.distance_only or torch.compiler.is_compiling():
        return None
    behind, ahead = (int((a.amax() - b.amin()).clamp(min=0)) for a, b in (positions, positions[::-1]))
    distances = torch.arange(-ahead, behind + 1, device=span.query.device)
    return ByDistance(mechanism.distance_bias(distances), ahead, *positions)


def set_backend(model: nn.Module, backend: str) -> None:
    """Say how the attention of a patched model is computed; the model's results stay the same, but for rounding.

    It holds for this model in this process: checkpoints do not keep it.

    Args:
        model: patched, or a PEFT model around one.
        backend: "auto" takes the fastest that applies to each call; "plain" the formula itself; "row",
            "row_windowed", "hankel", "flex", "chunked" or "merge" that one, at any length, and "plain" where it does
            not apply: all with dropout, for one query alone, in CUDA graphs and in graphs that are exported or of torch
            before 2.7 (2.9 on a GPU); all but "chunked" and "flex" where a mask leaves gaps between the keys that a
            query sees, or positions jump; "flex" with a mask of numbers, with gradients on a CPU, and with regions on
            a CPU at all, or where there is no mask but causality and positions jump; "row" and "row_windowed" where
            learned slopes get gradients.

    Raises:
        NotPatchedError: the model carries no scheme inside attention.
        OptionError: no such backend.
        UnsupportedSwapError: the scheme can never be computed so.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> model = patch_model(model, "alibi")
        >>> set_backend(model, "plain")
    """
    if backend != "auto" and backend not in BACKENDS:
        raise OptionError(f"no backend {backend!r}. There are: auto, {', '.join(BACKENDS)}.")
    mechanisms = [module for module in model.modules() if isinstance(module, Mechanism)]
    if not mechanisms:
        raise NotPatchedError(
            f"{type(model).__name__} carries no scheme inside attention, so there is no backend to choose: patch it "
            "with hf_posswap.patch_model first; a native swap runs as stock transformers does."
        )
    known = list(dict.fromkeys(name for mechanism in mechanisms for name in backends_of(mechanism)))
    if backend not in ("auto", "plain", *known):
        raise UnsupportedSwapError(
            f"{type(model).__name__} cannot be computed by {backend!r}. Its scheme has: {', '.join(['auto', *known])}."
        )
    for mechanism in mechanisms:
        mechanism.backend = backend


def describe_backends(scheme: Scheme, geometry: Geometry) -> tuple[str, ...]:
    """Return in words how the attention of a stack is computed under `scheme`, where it is not the model's own."""
    mechanism = scheme.mechanism(geometry)
    layers = [mechanism.for_layer(layer) for layer in range(geometry.num_layers)]
    return tuple(dict.fromkeys(_way(layer) for layer in layers if backends_of(layer)))


def _way(mechanism: Mechanism) -> str:
    names = [name for name in backends_of(mechanism) if name != "row_windowed"]
    if names[0] == "merge":
        names = [name for name in names if name != "flex"]  # which is for those who ask
    if names == ["plain"]:
        return f"plain: {BACKENDS['plain']}"
    rest = "chunked or plain" if "chunked" in names[1:] else "plain"
    least, of_flex = math.isqrt(MIN_QK_PAIRS), math.isqrt(MIN_FLEX_QK_PAIRS)
    if "flex" in names:
        rest = f"flex on a GPU, {of_flex} tokens and more; else {rest}"
    place = "sdpa" if names[0] == "merge" else "sdpa on a CPU"
    windows = f", row_windowed from {MIN_WINDOWED_KEYS} keys if a third can be left out" if names[0] == "row" else ""
    first = f"{names[0]}: {BACKENDS[names[0]]} ({place}, {least} tokens and more, {SITUATIONS}{windows})"
    return f"{first}; {'' if 'flex' in names else 'else '}{rest}; see set_backend"
