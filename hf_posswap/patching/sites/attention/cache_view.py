"""A view of a key-value cache, for one call, that rotates keys as they are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from transformers.cache_utils import Cache


class RotatingCache:
    """A cache whose `update` rotates the new keys first; everything else is the cache itself.

    Args:
        cache: what the caller passed; it keeps its type, and holds rotated keys afterwards.
        rotate: rotates new keys [B, G, Q, D]; the cache holds what it gives, [B, G, Q, keys_per_token D].
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


def takes_several_keys(cache: Any, layer: int | None, head_dim: int) -> bool:
    """Return whether layer `layer` of `cache` may hold several rotated keys [B, G, K, keys_per_token D] of each token.

    Some caches were given their shape, that of one key a token, before the first key came.
    """
    if cache is None:  # `layer` is not looked at: layers that are compiled one by one then share a graph
        return False
    layers = getattr(cache, "layers", ())
    held = getattr(layers[layer], "keys", None) if layer is not None and layer < len(layers) else None
    return held is None or held.shape[-1] != head_dim


def self_attention_cache(cache: Any) -> Any:
    """Return the part of `cache` that self-attention reads and writes."""
    return getattr(cache, "self_attention_cache", cache)
