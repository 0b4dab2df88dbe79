"""A view of a key-value cache, for one call, that rotates keys as they are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posswap.schemes.common.piece import Keys
from hf_posswap.schemes.mechanism import Mechanism

if TYPE_CHECKING:
    from transformers.cache_utils import Cache


class RotatingCache:
    """A cache whose `update` rotates the new keys first; everything else is the cache itself.

    Args:
        cache: what the caller passed; it keeps its type, and holds rotated keys afterwards.
        rotate: rotates new keys [B, G, Q, D]; the cache holds what it gives, of D or of keys_per_token D.
    """

    def __init__(self, cache: Cache, rotate: Callable[[Tensor], Tensor]) -> None:
        self._cache, self._rotate = cache, rotate

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Rotate `key_states`, hand them on, return all keys and values."""
        return self._cache.update(self._rotate(key_states), value_states, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def __len__(self) -> int:
        return len(self._cache)


def rotating(cache: Cache, rotate: Callable[[Tensor], Tensor]) -> Any:
    """Return a view of `cache` that rotates new self-attention keys; an encoder-decoder cache stays one."""
    from transformers.cache_utils import EncoderDecoderCache

    if not isinstance(cache, EncoderDecoderCache):
        return RotatingCache(cache, rotate)
    view = object.__new__(EncoderDecoderCache)
    view.__dict__.update(cache.__dict__)
    view.self_attention_cache = RotatingCache(cache.self_attention_cache, rotate)  # type: ignore[assignment]
    return view


def keys_of(cache: Any, layer: int | None, mechanism: Mechanism, device: torch.device) -> Keys:
    """Return how the keys come that layer `layer` of `cache` gives, and is to be given; None: there is no cache.

    Copies cost memory, and the time of all that moves with it; one key of each token costs the turning of those that
    are near, which only a CPU that is not compiling knows. What a layer holds already is gone on with: some caches were
    given their shape, that of one key a token, before the first key came.
    """
    if cache is None or not mechanism.stores_rotated_keys or not (mechanism.rotates or mechanism.keys_per_token > 1):
        return "raw"
    if mechanism.rotates:  # `layer` is not looked at: layers that are compiled one by one then share a graph
        return "rotated"
    single: Keys = "far" if mechanism.turns_on else "raw"
    layers = getattr(cache, "layers", ())
    found = layers[layer] if layer is not None and layer < len(layers) else None
    held = getattr(found, "keys", None)
    if held is not None and held.dim() == 4:
        return single if held.shape[-1] == mechanism.head_dim else "copies"
    grows = not hasattr(found, "max_cache_len") and not torch.compiler.is_compiling()
    return "far" if mechanism.turns_on and grows and device.type == "cpu" else "copies"


def self_attention_cache(cache: Any) -> Any:
    """Return the part of `cache` that self-attention reads and writes."""
    return getattr(cache, "self_attention_cache", cache)
