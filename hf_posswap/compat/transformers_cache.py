"""Where the tokens of a call stand in transformers' caches, and views of caches.

All are alike in transformers 5.14 to 5.23.
"""

from __future__ import annotations

from typing import Any


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
