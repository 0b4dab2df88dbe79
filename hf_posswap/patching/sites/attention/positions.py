"""Where the queries and keys of one attention call stand.

Queries stand at the `position_ids` that the model made or was given, or are counted on from the cache's offset. Keys
carry no position of their own once they are cached: `key_positions` keeps them with the cache.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_posswap.compat.torch_tensors import version_of
from hf_posswap.compat.transformers_cache import keys_of_call, tokens_before
from hf_posswap.families.base import PositionSource
from hf_posswap.patching.sites.attention.key_positions import record


@dataclass
class Span:
    """The queries and keys of one attention call.

    Attributes:
        query: positions of the queries, [B or 1, Q].
        key_length: K, keys after this call.
        is_prefill: whether the keys are exactly the tokens of the queries.
        cached: positions of all keys, [B or 1, K], where a cache keeps them; None: it keeps none.
        shared_cache: what was made of these positions for the layers that stand like this; None: nothing may be shared.
    """

    query: Tensor
    key_length: int
    is_prefill: bool
    cached: Tensor | None = None
    shared_cache: dict[Any, Any] | None = None

    @property
    def key(self) -> Tensor:
        """Positions of the keys, [B or 1, K]."""
        if self.is_prefill:
            return self.query
        assert self.cached is not None, "the cache was not asked to keep the positions of its keys"
        return self.cached

    @property
    def length(self) -> Tensor:
        """Tokens seen so far in each row, [B or 1, 1, 1, 1]."""
        return self.query.amax(dim=-1)[:, None, None, None] + 1


def find_span(
    hidden: Tensor,
    position_ids: Tensor | None,
    cache: Any,
    layer_idx: int,
    memo: ForwardMemo,
    first: int = 0,
    *,
    keeps_keys: bool = True,
) -> Span:
    """Return where queries and keys stand: for layers that stand alike, the very same span.

    Args:
        hidden: input of the attention module, [B, Q, E].
        position_ids: [B or 1, Q] as the model made them or the caller gave them; None: counted from the cache.
        cache: the self-attention cache, not yet updated, or None.
        layer_idx: of the attention module.
        memo: shared by the layers.
        first: what `position_ids` call position 0.
        keeps_keys: whether it will be asked where the keys stand, now or later.

    Raises:
        PosswapError: where cached keys stand cannot be known.
    """
    length = hidden.shape[1]
    past: int | Tensor = 0
    key_length, key_offset = length, 0
    if cache is not None:
        past = tokens_before(cache, layer_idx)
        key_length, key_offset = keys_of_call(cache, length, layer_idx)
        if isinstance(past, Tensor):
            past = past.to(hidden.device)

    def make(shared_cache: Any) -> Span:
        query = torch.arange(length, device=hidden.device)[None] + past if position_ids is None else position_ids
        query = query - first if first and position_ids is not None else query
        kept = record(cache, layer_idx, query, key_length) if cache is not None and keeps_keys else None
        is_prefill = not isinstance(past, Tensor) and past == 0 and key_length == length
        return Span(query, key_length, is_prefill, kept, shared_cache)

    if isinstance(past, Tensor):
        return make(None)
    key = (*identity_of(position_ids), cache, length, hidden.device, past, key_length, key_offset, keeps_keys)
    return memo.shared(key, make) if memo.knows(cache, position_ids) else make(None)


def identity_of(position_ids: Tensor | None) -> tuple[Tensor | None, int | None]:
    """Return a tensor and its version, by which it is known again if nothing was written into it since."""
    if position_ids is None or torch.compiler.is_compiling():  # a traced tensor has no version
        return position_ids, None
    return position_ids, version_of(position_ids)


@dataclass
class ForwardMemo:
    """What the layers of one forward share: where they stand, and what the first of them made of it, as cos and sin.

    A span is found again only by the very cache, tensor and numbers it was made from, so a stale one cannot be used;
    `clear` at the start and end of each forward frees it. Where layers are called by hand, or run again in the
    backward, only what surely did not change since is found again. While a graph is being traced nothing is kept: the
    compiler merges equal work by itself.
    """

    entries: list[tuple[tuple[Any, ...], Span]] = field(default_factory=list)
    masks: list[tuple[weakref.ref[Tensor], int | None, Any]] = field(default_factory=list)
    """What was read from the masks of this forward."""
    in_forward: bool = False
    """Whether the model's own forward runs: none of its code writes into what its layers are given."""
    given: Tensor | None = None
    """Position ids [B or 1, Q] that the model was given: not all models tell their attention of them."""
    given_by_caller: bool = False
    """Whether a caller gave them, in the model's own count; otherwise they count from 0."""
    runs_again: bool = False
    """Whether layers run again in the backward."""
    drops_bias: bool = False
    """Whether the bias that the model itself makes was taken away: what is left of it is zeros."""
    source: PositionSource = "arange"
    """What the stock class counts where it is given no position ids."""
    padding_id: int | None = None
    """The token id that is not counted, where it counts input ids."""

    def clear(self) -> None:
        """Forget everything."""
        self.entries.clear()
        self.masks.clear()

    def knows(self, cache: Any, *tensors: Tensor | None) -> bool:
        """Return whether these are known again: outside of a forward a cache, or what counts no writes, may change."""
        counted = (tensor is None or version_of(tensor) is not None for tensor in tensors)
        return self.in_forward or torch.compiler.is_compiling() or (cache is None and all(counted))

    def of_mask(self, mask: Tensor, read: Callable[[], Any]) -> Any:
        """Return what `read` makes of `mask`, once in a forward as long as nothing is written into it."""
        if not self.knows(None, mask):
            return read()
        version = version_of(mask)
        for known, at, found in self.masks:
            if known() is mask and at == version:
                return found
        found = read()
        self.masks.append((weakref.ref(mask), version, found))
        return found

    def shared(self, key: tuple[Any, ...], make: Callable[[Any], Span]) -> Span:
        """Return the span that was kept under `key`, compared by identity for tensors, or what `make` gives.

        Args:
            key: what the span is made from.
            make: takes what `Span.shared_cache` begins as.
        """
        if torch.compiler.is_compiling():
            return make(None)
        for known, span in self.entries:
            if len(known) == len(key) and all(map(_same, known, key)):
                return span
        span = make({})
        self.entries.append((key, span))
        return span

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardMemo:
        return ForwardMemo(drops_bias=self.drops_bias, source=self.source, padding_id=self.padding_id)

    def __getstate__(self) -> dict[str, Any]:
        return vars(copy.deepcopy(self))


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    return bool(a == b)
