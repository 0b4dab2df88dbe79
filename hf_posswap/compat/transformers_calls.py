"""What calls of transformers' models and attention modules carry: arguments, by signature; caches, by their type.

Names of arguments come and go with releases: 5.24 calls `cache` what was `past_key_values` before. What can be
found by its type is found by type; names are taken from the signature of the class. What is in caches is alike in
transformers 5.14 to 5.24, but for what says otherwise.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypedDict, TypeGuard

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import Cache

CACHE_NAMES = ("cache", "past_key_values", "layer_past", "cache_params")
"""What releases from 5.14 to 5.24 call the cache of a forward, the newest first."""


def forward_parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the forward of the module class `cls`, without `self`, in order.

    Touches `forward.__wrapped__`, by which decorators of transformers keep the signature of what they wrap. Without it
    arguments given by place cannot be named.
    """
    hashable_class: object = cls  # mypy: the type of a module is not hashable
    return _forward_parameters(hashable_class)


@functools.cache
def _forward_parameters(cls: type[nn.Module]) -> Mapping[str, inspect.Parameter]:
    parameters = list(inspect.signature(cls.forward).parameters.values())
    return {parameter.name: parameter for parameter in parameters[1:]}


def names_arguments(cls: type) -> bool:
    """Return whether the forward of the module class `cls` says what its arguments are called.

    Touches the same as `forward_parameters`. Without it a wrapper that takes `*args` hides what a call means.
    """
    parameters = forward_parameters(cls).values()
    return any(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def is_cache(value: object) -> TypeGuard[Cache]:
    """Return whether `value` is a key-value cache of transformers, paged or not.

    Touches `cache_utils.Cache` and `generation.continuous_batching.cache.PagedAttentionCache`, which is not a Cache.
    Without it a cache would have to be found by the name of its argument.
    """
    return isinstance(value, cache_classes())


def is_paged_cache(value: object) -> bool:
    """Return whether `value` is the cache of continuous batching, which holds many requests side by side.

    Touches `generation.continuous_batching.cache.PagedAttentionCache`. Without it continuous batching is not told from
    a call with one text a row.
    """
    return isinstance(value, cache_classes()[1:])


_known_classes: tuple[type, ...] = ()


def cache_classes() -> tuple[type, ...]:
    """Return the classes of key-value caches, the paged one last.

    Touches the same as `is_cache`.
    """
    global _known_classes  # no functools.cache: each forward asks, and torch.compile looks through it
    if _known_classes:
        return _known_classes
    from transformers.cache_utils import Cache

    _known_classes = (Cache,)
    with suppress(ImportError):  # a release that moved it has no paged cache that a scheme is known to work with
        from transformers.generation.continuous_batching.cache import PagedAttentionCache

        _known_classes = Cache, PagedAttentionCache
    return _known_classes


def find_cache(args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[int | str, Any] | None:
    """Return the place or name of the cache among the arguments of a call, and the cache; None: there is none.

    Touches the same as `is_cache`.

    Raises:
        TypeError: an argument takes keys and values like a cache, and is of no class that is known.

    Example:
        >>> from transformers import DynamicCache
        >>> cache = DynamicCache()
        >>> find_cache([None], {"whatever": cache}) == ("whatever", cache)
        True
    """
    classes = cache_classes()
    for index, value in enumerate(args):
        if isinstance(value, classes):
            return index, value
        _refuse_unknown_cache(value)
    for name, value in kwargs.items():
        if isinstance(value, classes):
            return name, value
        _refuse_unknown_cache(value)
    return None


_NO_CACHES = (Tensor, bool, int, float, str, tuple, list, dict, nn.Module, type(None))


def _refuse_unknown_cache(value: object) -> None:
    if isinstance(value, _NO_CACHES):  # asked in each layer of each step: a union of types would be made anew
        return
    if hasattr(value, "update") and (hasattr(value, "get_seq_length") or hasattr(value, "get_query_offset")):
        raise TypeError(
            f"an argument of class {type(value).__name__} works like a cache and is not a transformers.Cache: which "
            "positions its keys have is unknown. Use a transformers.DynamicCache, or use_cache=False."
        )


def cache_names(cls: type) -> tuple[str, ...]:
    """Return the names of the arguments of the forward of `cls` that may hold a cache: by annotation, or as known.

    Touches the names `CACHE_NAMES`, and annotations of `Cache`. Without it an argument that holds no cache in a call
    is not told from others.
    """
    parameters = forward_parameters(cls)
    return tuple(
        name for name, parameter in parameters.items() if name in CACHE_NAMES or _says_cache(parameter.annotation)
    )


def cache_argument(model: nn.Module) -> str:
    """Return what the forward of `model` calls its cache: "cache", or "past_key_values" before transformers 5.24.

    Touches the names `CACHE_NAMES`, annotations of `Cache`, and the signature of `masking_utils.create_causal_mask`,
    for classes that hand on whatever they are given. Without it a model cannot be called with a cache in all releases.

    Example:
        >>> from transformers import GPT2Config, GPT2Model
        >>> model = GPT2Model(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11))
        >>> model(input_ids=model.dummy_inputs["input_ids"] % 11, **{cache_argument(model): None}) is not None
        True
    """
    base = getattr(model, "base_model", model)
    for cls in (type(model), type(base)):
        name = _cache_parameter(forward_parameters(cls))
        if name is not None:
            return name
    from transformers.masking_utils import create_causal_mask

    return _cache_parameter(inspect.signature(create_causal_mask).parameters) or CACHE_NAMES[0]


def _cache_parameter(parameters: Mapping[str, inspect.Parameter]) -> str | None:
    known = next((name for name in CACHE_NAMES if name in parameters), None)
    if known is not None:
        return known
    return next((name for name, parameter in parameters.items() if _says_cache(parameter.annotation)), None)


def _says_cache(annotation: object) -> bool:
    if isinstance(annotation, str):
        return "Cache" in annotation
    types = (annotation, *typing.get_args(annotation))
    return any(isinstance(each, type) and issubclass(each, cache_classes()) for each in types)


def cache_in(output: Mapping[str, object] | Sequence[object]) -> Cache | None:
    """Return the cache that the `output` of a model holds, or None.

    Touches the same as `is_cache`; and that outputs of models are dicts or tuples.

    Example:
        >>> from transformers import DynamicCache
        >>> cache_in({"logits": 1, "cache": (cache := DynamicCache())}) is cache
        True
    """
    values = output.values() if isinstance(output, Mapping) else output
    return next((value for value in values if is_cache(value)), None)


def tensors_of_layers(layers: Iterable[object]) -> list[Tensor]:
    """Return the tensors that transformers keeps in layers of a cache: keys and values, states of linear attention.

    Touches that layers hold them as attributes, or in dicts by number, as `LinearAttentionLayer` does.
    """
    values = [value for layer in layers for name, value in vars(layer).items() if not name.startswith("posswap")]
    values += [item for value in values if isinstance(value, dict) for item in value.values()]
    return [value for value in values if isinstance(value, Tensor)]


def tokens_before(cache: Cache, layer: int) -> int | Tensor:
    """Return how many tokens layer `layer` of `cache` has seen: an int, or a tensor where it must not be read.

    Touches `Cache.get_query_offset`, since 5.14. Without it positions of a step with a cache are not known.
    """
    return cache.get_query_offset(layer)


def keys_of_call(cache: Cache, queries: int, layer: int) -> tuple[int, int]:
    """Return how many keys a call of `queries` tokens will see in layer `layer` of `cache`, and the first one's index.

    Touches `Cache.get_mask_sizes(query_length, layer_idx)`, since 5.5. Without it keys of static and sliding caches
    would be taken to stand where they do not.
    """
    keys, first = cache.get_mask_sizes(queries, layer)
    return keys, first


def tells_paged_positions() -> bool:
    """Return whether continuous batching tells attention modules where the keys of each request end.

    Touches `PagedAttentionCache.update(..., kwargs)`, since 5.19. Without it schemes that ask where cached keys stand
    are refused there.
    """
    updates = [getattr(cls, "update", None) for cls in cache_classes()[1:]]
    return any(update is not None and "kwargs" in inspect.signature(update).parameters for update in updates)


class PagedArguments(TypedDict):
    """What continuous batching passes to attention modules with the cache, of R requests.

    Attributes:
        cu_seq_lens_q: 0, and where the new tokens of each request end among those of all, [R + 1].
        cu_seq_lens_k: the same of the keys, by type of layers.
        read_index: which keys are read from the cache, by its allocators; none: it is given those of new tokens alone.
    """

    cu_seq_lens_q: Tensor
    cu_seq_lens_k: dict[str, Tensor]
    read_index: list[Tensor]


def paged_keys(cache: object, layer: int, arguments: PagedArguments) -> tuple[Tensor, int]:
    """Return 0 and where the keys of each request end that a layer of a paged cache is about to give, and their number.

    Touches `PagedAttentionCache.layer_to_allocator`, and the names and types in `PagedArguments`. Without it schemes
    that ask where cached keys stand are refused in continuous batching.
    """
    allocator = vars(cache)["layer_to_allocator"][layer]
    ends, read = arguments["cu_seq_lens_k"][allocator.layer_type], arguments["read_index"][allocator.index]
    return ends, read.numel()


def cache_layer_class(name: str, bases: tuple[type, ...], body: Mapping[str, object]) -> type:
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


def is_growing_cache(cache: object) -> bool:
    """Return whether `cache` is of the very class whose layers count their tokens each by itself, and stay in place.

    Touches `cache_utils.DynamicCache` and `Cache.offloading`. Without it what was found of one layer would be taken for
    another that counts otherwise.
    """
    from transformers.cache_utils import DynamicCache

    return type(cache) is DynamicCache and not getattr(cache, "offloading", True)


def quantized_keys(layer: object) -> object:
    """Return what a quantizing cache layer stores of its older keys, in its own form; None: the layer quantizes none.

    Touches `BaseQuantizedLayer._quantized_keys` (`QuantizedLayer._quantized_keys` before 5.24). Without it keys that
    another package evicts from a quantized cache would silently be taken for a cropped tail.
    """
    return getattr(layer, "_quantized_keys", None)


def self_attention_cache(cache: Cache | None) -> Any:
    """Return the part of `cache` that self-attention reads and writes: all of it, but for an encoder-decoder cache.

    Touches `EncoderDecoderCache.self_attention_cache`. Without it keys of an encoder would be taken for a decoder's.
    """
    return getattr(cache, "self_attention_cache", cache)


def write_keys(
    cache: Cache, key: Tensor, value: Tensor, layer: int, arguments: dict[str, object]
) -> tuple[Tensor, Tensor]:
    """Put the new `key` and `value`, [B, G, Q, D] each, into layer `layer` of `cache`; return all, [B, G, K, D].

    Touches `Cache.update`, and that since 5.24 a paged cache is written so too, which takes the `arguments` of the
    attention function and changes them. Without it continuous batching would attend to the new tokens alone.
    """
    if is_paged_cache(cache):
        return cache.update(key, value, layer, kwargs=arguments)
    return cache.update(key, value, layer)


class _WrittenThrough:
    """Mixed into a class of caches, before it: hands what is written to another cache, after a change of the keys."""

    posswap_cache: Cache
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


def cache_view(cache: Cache, change: Callable[[Tensor], Tensor]) -> Cache:
    """Return a view of `cache`, for one call, that changes the keys which are written; an instance of its class.

    Of an encoder-decoder cache the keys of self-attention are changed.

    Touches that caches keep what they are in their `__dict__`, and `EncoderDecoderCache.self_attention_cache`. Without
    it a view would not be a Cache by its type, and code that checks types would not take it for one.

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
