"""Evict keys from a cache together with their positions, so that every scheme stays right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posswap.compat.transformers_cache import is_growing_layer, self_attention_cache
from hf_posswap.errors import PosswapError
from hf_posswap.patching.sites.attention.key_positions import CHANGED, UNKNOWN, evictable_layer, is_intact


def evict_keys(cache: Any, keep: Tensor) -> None:
    """Keep some keys and values of a cache, the same in all layers and heads, and remove the others.

    Plain eviction (`layer.keys = layer.keys[:, :, keep]`) leaves wrong positions for schemes that need those of keys,
    such as alibi, t5 and self_extend, which then refuse the cache. This function removes the positions too. For schemes
    whose keys carry their positions, such as rope, and for stock models it equals plain eviction.

    From then on the model counts only the remaining keys, so pass the `position_ids` of new tokens, and an
    `attention_mask` with one column for each kept key and new token. Code of a stock class that uses the index of a
    key, such as the mask of a sliding window, treats the kept keys as neighbours, as it does after plain eviction.

    Args:
        cache: a `DynamicCache`, or the self-attention cache of an `EncoderDecoderCache`; it is changed in
            place.
        keep: which keys stay: their indices in the cache, ascending, [K], or [B, K] with other ones for each row; or
            bool [T], True for each of T keys that stays.

    Raises:
        PosswapError: `keep` does not fit the cache; the cache holds no tokens, or not as growing layers of full
            attention; or its keys were replaced before.

    Example:
        >>> import torch
        >>> from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import evict_keys, patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> model = patch_model(model.eval(), "alibi")
        >>> cache = DynamicCache()
        >>> out = model(torch.arange(8)[None], cache)
        >>> evict_keys(cache, torch.tensor([0, 1, 5, 6, 7]))  # attention sinks, and the last tokens
        >>> out = model(torch.tensor([[8]]), cache, position_ids=torch.tensor([[8]]))
        >>> cache.get_seq_length(), tuple(out.logits.shape)
        (6, (1, 1, 11))
    """
    layers = _layers(cache)
    rows, length = layers[0].keys.shape[0], layers[0].keys.shape[-2]
    index = _index(keep, rows, length)
    kept = [(_selected(layer.keys, index), _selected(layer.values, index)) for layer in layers]
    positions = [_selected_positions(getattr(layer, "posswap_positions", None), index) for layer in layers]
    self_cache = self_attention_cache(cache)
    for number, ((keys, values), at) in enumerate(zip(kept, positions, strict=True)):
        layer = evictable_layer(self_cache, number)
        layer.keys, layer.values = keys, values
        layer.posswap_positions, layer.posswap_is_evicted = at, True
        layer.keep_keys(intact=True)


def _layers(cache: Any) -> list[Any]:
    """Return the layers of a cache, whose keys can be chosen from.

    Raises:
        PosswapError: they cannot.
    """
    layers = getattr(self_attention_cache(cache), "layers", None)
    if not isinstance(layers, list) or not layers or getattr(layers[0], "keys", None) is None:
        raise PosswapError(
            f"evict_keys was given a {type(cache).__name__} that holds no tokens in layers. What works: a DynamicCache "
            "that a forward has filled."
        )
    for number, layer in enumerate(layers):
        native = getattr(layer, "native_class", type(layer))
        if not is_growing_layer(native):
            raise PosswapError(
                f"evict_keys: layer {number} of this cache is a {native.__name__}, whose keys have places of their own "
                "(a static cache), follow a window, or are not kept as they are. What works: a DynamicCache without "
                "sliding layers (DynamicCache(), passed to the first forward) and a model of full attention."
            )
        if getattr(layer, "keys", None) is None or layer.keys.shape[-2] != layers[0].keys.shape[-2]:
            raise PosswapError(
                f"evict_keys: layer {number} of this cache does not hold as many keys as layer 0. Evict after a whole "
                "forward, from all layers at once."
            )
        if hasattr(layer, "posswap_keys") and not is_intact(layer):
            raise PosswapError(CHANGED.format(layer=number, shapes=""))
        known = getattr(layer, "posswap_positions", None)
        if known is not None and known.shape[1] < layer.keys.shape[-2]:
            raise PosswapError(
                f"evict_keys: the cache holds {layer.keys.shape[-2]} tokens, and where they stand is known of "
                f"{known.shape[1]} alone. {UNKNOWN}"
            )
    return layers


def _index(keep: Any, rows: int, length: int) -> Tensor:
    """Return the indices of the keys that stay, [1, K] or [B, K].

    Args:
        keep: as `evict_keys` takes it.
        rows: B.
        length: T, keys in the cache.

    Raises:
        PosswapError: it does not fit.
    """
    expected = f"indices [K] or [{rows}, K], ascending, of the {length} keys in the cache, or bool [{length}]"
    if not isinstance(keep, Tensor) or keep.is_floating_point() or keep.is_complex():
        raise PosswapError(f"evict_keys: keep is {type(keep).__name__}; give a tensor: {expected}.")
    if keep.dtype == torch.bool:
        if keep.shape != (length,):
            raise PosswapError(f"evict_keys: keep is bool {list(keep.shape)}; give {expected}.")
        keep = keep.nonzero()[:, 0]
    index = keep[None] if keep.dim() == 1 else keep
    if index.dim() != 2 or len(index) not in (1, rows) or not index.shape[1]:
        raise PosswapError(f"evict_keys: keep has shape {list(keep.shape)}; give {expected}, at least one of them.")
    ascending = bool((index[:, 1:] > index[:, :-1]).all())
    if not ascending or int(index.min()) < 0 or int(index.max()) >= length:
        raise PosswapError(f"evict_keys: keep is {keep.tolist()}; give {expected}, each once.")
    return index.long()


def _selected(states: Tensor, index: Tensor) -> Tensor:
    """Return the keys or values at `index` [1 or B, K] of `states` [B, G, T, D]."""
    index = index.to(states.device)
    if len(index) == 1:
        return states.index_select(2, index[0])
    return states.gather(2, index[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))


def _selected_positions(positions: Tensor | None, index: Tensor) -> Tensor | None:
    """Return those of `positions` [1 or B, T] at `index` [1 or B, K]; None: this layer keeps none."""
    if positions is None:
        return None
    index, rows = index.to(positions.device), max(len(positions), len(index))
    return positions.expand(rows, -1).gather(1, index.expand(rows, -1))
