"""Positions of a call's tokens in transformers' caches, and views of caches.

All are alike in transformers 5.14 to 5.24, but for what says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hf_posswap.compat.transformers_calls import cache_classes, is_paged_cache


def tokens_before(cache: Any, layer: int) -> Any:
    """Return how many tokens layer `layer` of `cache` has seen: an int, or a tensor where it must not be read.

    Touches `Cache.get_query_offset`, since 5.14. Without it positions of a step with a cache are not known.
    """
    return cache.get_query_offset(layer)


def keys_of_call(cache: Any, queries: int, layer: int) -> tuple[int, Any]:
    """Return how many keys a call of `queries` tokens will see in layer `layer` of `cache`, and the first one's index.

    Touches `Cache.get_mask_sizes(query_length, layer_idx)`, since 5.5. Without it keys of static and sliding caches
    would be taken to stand where they do not.
    """
    keys, first = cache.get_mask_sizes(queries, layer)
    return keys, first


def cache_layer_class(name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type:
    """Return a new class of cache layers, of which transformers' caches are not told.

    Touches `CacheLayerMixin._layer_type`, by which a subclass takes the place of its parent in the mappings that caches
    choose their layers from. Without it caches of models that are not swapped would be made of our layers.
    """
    return type(name, bases, {**body, "_layer_type": None})


def is_growing_layer(layer: type) -> bool:
    """Return whether `layer` is the class of cache layers that hold all tokens, in their order, as `keys` and `values`.

    Touches `cache_utils.DynamicLayer`. Without it keys would be removed from layers that also hold something else.
    """
    from transformers.cache_utils import DynamicLayer

    return layer is DynamicLayer


def quantized_keys(layer: Any) -> Any:
    """Return what a quantizing cache layer stores of its older keys, in its own form; None: the layer quantizes none.

    Touches `BaseQuantizedLayer._quantized_keys` (`QuantizedLayer._quantized_keys` before 5.24). Without it keys that
    another package evicts from a quantized cache would silently be taken for a cropped tail.
    """
    return getattr(layer, "_quantized_keys", None)


def self_attention_cache(cache: Any) -> Any:
    """Return the part of `cache` that self-attention reads and writes: all of it, but for an encoder-decoder cache.

    Touches `EncoderDecoderCache.self_attention_cache`. Without it keys of an encoder would be taken for a decoder's.
    """
    return getattr(cache, "self_attention_cache", cache)


def write_keys(cache: Any, key: Tensor, value: Tensor, layer: int, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Put the new `key` and `value`, [B, G, Q, D] each, into layer `layer` of `cache`; return all, [B, G, K, D].

    Touches `Cache.update`, and that since 5.24 a paged cache is written so too, which takes the `arguments` of the
    attention function and changes them. Without it continuous batching would attend to the new tokens alone.
    """
    if is_paged_cache(cache):
        return cache.update(key, value, layer, kwargs=arguments)
    return cache.update(key, value, layer)


class _WrittenThrough:
    """Mixed into a class of caches, before it: hands what is written to another cache, after a change of the keys."""

    posswap_cache: Any
    posswap_change: Callable[[Tensor], Tensor]
    posswap_is_view = True
    """Marks a view also where a checkpoint's bundled code made it, with its own class."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Change `key_states`, put them with `value_states` into the cache, return all keys and values.

        Touches `Cache.update`, by which attention modules write. Without it keys would be cached as they are projected.
        """
        return self.posswap_cache.update(self.posswap_change(key_states), value_states, *args, **kwargs)


_VIEWS: dict[type, type] = {}
"""The classes of views, by the class of the cache that each shows."""


def prepare_views() -> None:
    """Make the view classes of all caches that there are ahead: none can be made while torch.compile traces.

    Touches the same as `cache_view`.
    """
    waiting: list[type] = list(cache_classes())
    while waiting:
        native = waiting.pop()
        below: list[type] = native.__subclasses__()
        waiting += [cls for cls in below if not hasattr(cls, "posswap_is_view")]
        _view_class(native)


def _view_class(native: type) -> type:
    view_class = _VIEWS.get(native)
    if view_class is None:
        body = {"__module__": __name__}
        view_class = _VIEWS[native] = type(f"WrittenThrough{native.__name__}", (_WrittenThrough, native), body)
    return view_class


def cache_view(cache: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a view of `cache`, for one call, that changes the keys which are written; an instance of its class.

    Of an encoder-decoder cache the keys of self-attention are changed.

    Touches that caches keep what they are in their `__dict__`, and `EncoderDecoderCache.self_attention_cache`. Without
    it a view would be no Cache by its type, and code that checks types would not take it for one.

    Args:
        cache: that the caller passed; it holds what `change` makes of the keys.
        change: of new keys [B, G, Q, D].
    """
    self_attention = self_attention_cache(cache)
    if self_attention is not cache:
        whole: Any = object.__new__(type(cache))
        whole.__dict__.update(cache.__dict__)
        whole.self_attention_cache = cache_view(self_attention, change)
        return whole
    view: Any = object.__new__(_view_class(type(cache)))
    view.__dict__.update(cache.__dict__)
    view.posswap_cache, view.posswap_change = cache, change
    return view
