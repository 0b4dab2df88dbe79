"""Where the queries and keys of one attention call stand.

Queries stand at the `position_ids` that the model made or was given, or are counted on from the cache's offset. Keys
carry no position of their own once they are cached: `key_positions` keeps them with the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posswap.compat.transformers_cache import keys_of_call, tokens_before
from hf_posswap.errors import PosswapError
from hf_posswap.patching.sites.attention.forward_memo import ForwardMemo, Span, identity_of
from hf_posswap.patching.sites.attention.key_positions import record, watch


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
        PosswapError: where cached keys stand cannot be known, or another hand replaced them; or the cache counts the
            new tokens otherwise as queries than as keys.
    """
    length = hidden.shape[1]
    past: int | Tensor = 0
    key_length, key_offset = length, 0
    if cache is not None:
        past = tokens_before(cache, layer_idx)
        key_length, key_offset = keys_of_call(cache, length, layer_idx)
        if isinstance(past, Tensor):
            past = past.to(hidden.device)
        elif not torch.compiler.is_compiling():
            _check_agrees(cache, past + length, key_offset + key_length)

    def make(shared_cache: Any) -> Span:
        query = torch.arange(length, device=hidden.device)[None] + past if position_ids is None else position_ids
        query = query - first if first and position_ids is not None else query
        kept = record(cache, layer_idx, query, key_length) if cache is not None and keeps_keys else None
        is_prefill = not isinstance(past, Tensor) and past == 0 and key_length == length
        return Span(query, key_length, is_prefill, kept, shared_cache)

    if cache is not None and keeps_keys:
        watch(cache, layer_idx)
    if isinstance(past, Tensor):
        return make(None)
    key = (*identity_of(position_ids), cache, length, hidden.device, past, key_length, key_offset, keeps_keys)
    return memo.shared(key, make) if memo.knows(cache, position_ids) else make(None)


def _check_agrees(cache: Any, queries_end: int, keys_end: int) -> None:
    """Refuse a cache by which the last of the new tokens stands behind the last key, which is its own."""
    if queries_end > keys_end:
        raise PosswapError(
            f"a cache of class {type(cache).__name__} says that the new tokens end at {queries_end} as queries and at "
            f"{keys_end} as keys: what its offsets mean is not understood. Use use_cache=False, a DynamicCache, or a "
            "release of transformers that hf_posswap was tested with."
        )
