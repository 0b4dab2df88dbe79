"""What calls of transformers' models and attention modules carry: caches, found by their type; arguments, by signature.

Names of arguments come and go with releases: 5.24 calls `cache` what was `past_key_values` before. What can be
found by its type is found by type; names are taken from the signature of the class.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

CACHE_NAMES = ("cache", "past_key_values", "layer_past", "cache_params")
"""What releases from 5.14 to 5.24 call the cache of a forward, the newest first."""


def forward_parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the forward of the module class `cls`, without `self`, in order.

    Touches `forward.__wrapped__`, by which decorators of transformers keep the signature of what they wrap. Without it
    arguments given by place cannot be named.
    """
    hashable_class: Any = cls  # mypy: the type of a module is not hashable
    return _forward_parameters(hashable_class)


@functools.cache
def _forward_parameters(cls: Any) -> Mapping[str, inspect.Parameter]:
    parameters = list(inspect.signature(cls.forward).parameters.values())
    return {parameter.name: parameter for parameter in parameters[1:]}


def names_arguments(cls: type) -> bool:
    """Return whether the forward of the module class `cls` says what its arguments are called.

    Touches the same as `forward_parameters`. Without it a wrapper that takes `*args` hides what a call means.
    """
    parameters = forward_parameters(cls).values()
    return any(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def is_cache(value: Any) -> bool:
    """Return whether `value` is a key-value cache of transformers, paged or not.

    Touches `cache_utils.Cache` and `generation.continuous_batching.cache.PagedAttentionCache`, which is no Cache.
    Without it a cache would have to be found by the name of its argument.
    """
    return isinstance(value, cache_classes())


def is_paged_cache(value: Any) -> bool:
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
    if not _known_classes:
        _known_classes = _import_classes()
    return _known_classes


def _import_classes() -> tuple[type, ...]:
    from transformers.cache_utils import Cache

    try:
        from transformers.generation.continuous_batching.cache import PagedAttentionCache
    except ImportError:  # a release that moved it has no paged cache that a scheme is known to work with
        return (Cache,)
    return Cache, PagedAttentionCache


def find_cache(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int | str, Any] | None:
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


def _refuse_unknown_cache(value: Any) -> None:
    if value is None or isinstance(value, Tensor | bool | int | float | str | tuple | list | dict | nn.Module):
        return
    if hasattr(value, "update") and (hasattr(value, "get_seq_length") or hasattr(value, "get_query_offset")):
        raise TypeError(
            f"an argument of class {type(value).__name__} works like a cache and is no transformers.Cache: which "
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


def _says_cache(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return "Cache" in annotation
    types = (annotation, *typing.get_args(annotation))
    return any(isinstance(each, type) and issubclass(each, cache_classes()) for each in types)


def cache_in(output: Any) -> Any:
    """Return the cache that the `output` of a model holds, or None.

    Touches the same as `is_cache`; and that outputs of models are dicts or tuples.

    Example:
        >>> from transformers import DynamicCache
        >>> cache_in({"logits": 1, "cache": (cache := DynamicCache())}) is cache
        True
    """
    values = output.values() if isinstance(output, Mapping) else output
    return next((value for value in values if is_cache(value)), None)
