"""One attention call as the backends see it, and the segments that its mask and its positions leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_posswap.compat.torch_fake import holds_values, is_fake
from hf_posswap.compat.torch_tensors import transforms_active
from hf_posswap.kernels import fused
from hf_posswap.kernels.distance_bias import by_line
from hf_posswap.kernels.flex import ByDistance, Penalty
from hf_posswap.kernels.mask_segments import placed, segments_of, together
from hf_posswap.kernels.segments import Segment, whole
from hf_posswap.patching.sites.attention.forward_memo import ForwardMemo, Span
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.utils.devices import device_type

ALTERING = ("softcap", "s_aux", "position_bias", "head_mask", "score_mod", "cache", "output_attentions")
"""Arguments of an attention function that ask for what the kernels do not do."""
MOST_REST = 1 / 3
"""Pairs of a query and a key that a way cannot take, over those that it can, up to which "auto" takes it."""


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
        shared: gives what a function makes for a key, once for all layers that stand alike.
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
    shared: Callable[[Any, Callable[[], Any]], Any]

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
        if self.alters or self.query.shape[2] == 1:
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

    @cached_property
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
    query: Tensor, keys: int, mask: Any, memo: ForwardMemo, *, causal: bool
) -> tuple[Segment, ...] | None:
    """Return what `query` [B, H, Q, D] sees of `keys` keys, without positions; None: that is not told by segments.

    A mask is looked at once in a forward, for all layers that are given it.
    """
    batch, _, length, _ = query.shape
    if mask is None:
        return whole(batch, length, min(length, keys) if causal else keys, causal=causal)  # as stock: from the first
    if not isinstance(mask, Tensor) or device_type(mask) != "cpu" or not holds_values(mask):
        return None  # to read it from a GPU would cost more than it saves
    return memo.of_mask(mask, lambda: segments_of(mask, batch, keys))


def lay_out(seen: tuple[Segment, ...], span: Span) -> Layout:
    """Return the segments of a mask with the positions of the queries and keys."""
    of_queries = span.query.cpu()
    of_keys = of_queries if span.is_prefill else span.key.cpu()
    pieces_placed = [piece for segment in seen for piece in placed(segment, of_queries, of_keys)]
    regular = together([piece for piece, rises in pieces_placed if rises])
    return Layout(tuple(regular), tuple(piece for piece, rises in pieces_placed if not rises))
