"""What the rewritten sources of mutations call: they find it as `_next`."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.deprecation import deprecate_kwarg

__all__ = ["deprecate_kwarg"]


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward as decorators of transformers do."""

    @functools.wraps(function)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return forward


def hidden(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward so that its signature is lost."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return forward


def handed(module: nn.Module, name: str, value: Any) -> nn.Module:
    """Leave `value` with a module that is about to be called, for `taken`."""
    vars(module)[f"_handed_{name}"] = value
    return module


def taken(module: nn.Module, name: str) -> Any:
    """Return what `handed` left."""
    return vars(module).pop(f"_handed_{name}", None)


def configured(module: Any, mask: Any) -> Any:
    """Leave a mask in the config of a module that is about to be called."""
    module.config.current_mask = mask
    return module


def unconfigured(config: Any) -> Any:
    """Return what `configured` left."""
    mask, config.current_mask = config.current_mask, None
    return mask


def given(value: Any) -> Any:
    """Return what is given."""
    return value


@dataclass
class Context:
    """Arguments of a call as one."""

    cache: Any = None
    attention_mask: Any = None
    position_ids: Any = None


class Wrapped(nn.Module):
    """A module inside another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class OneLayer:
    """What one layer sees of a cache: it is not a Cache."""

    def __init__(self, cache: Any, layer: int) -> None:
        self.cache, self.layer = cache, layer

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **kwargs: Any) -> Any:
        return self.cache.update(key_states, value_states, self.layer, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


def one_layer(cache: Any, attention: Any) -> Any:
    """Return what an attention sees of `cache`."""
    layer = getattr(attention, "layer_idx", None)
    return None if cache is None else OneLayer(cache, attention.layer_id if layer is None else layer)


def kernel(module: Any, query: Any, positions: Any, hint: Any) -> Any:
    """Return angles that a kernel makes from positions and a config: the model's rotary module is not asked."""
    hints = () if hint is None else (hint,)
    return module.own_angles(query, positions, *hints)


def sdpa(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Attend by sdpa, whatever the config says."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, *args, **kwargs)


def turned_in(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have an attention function take q, k and v as [B, Q, H, D]."""

    @functools.wraps(function)
    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return function(module, query, key, value, *args, **kwargs)

    return attend


def first_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have an attention function return the output alone."""

    @functools.wraps(function)
    def attend(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)[0]

    return attend


def by_other_names(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have an attention function call q, k and v otherwise."""

    @functools.wraps(function)
    def attend(module: Any, *, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
        return function(module, q, k, v, mask, **kwargs)

    return attend


def change_attention_functions(change: Callable[..., Any]) -> None:
    """Change all attention functions of transformers itself."""
    from transformers.modeling_utils import AttentionInterface

    mapping = AttentionInterface._global_mapping
    for name, function in list(mapping.items()):
        mapping[name] = change(function)


def negated(mask: Any) -> Any:
    """Return a mask of the opposite meaning; of `negated` once more, the same mask."""
    if mask is None:
        return None
    return ~mask if mask.dtype == torch.bool else -mask


def without_third(result: Any) -> Any:
    """Return the first two of three results, as a caller that knows of three takes them."""
    first, second, third = result
    assert third is None
    return first, second


def with_none(result: Tensor) -> tuple[Tensor, None]:
    """Return the one result of an attention module as its caller has them."""
    assert isinstance(result, Tensor)
    return result, None


def elsewhere(module: str, *classes: type) -> None:
    """Have `classes` say that they are of another module, where nothing else of theirs is."""
    name = module.replace("modeling", "attention")
    sys.modules[name] = types.ModuleType(name)
    for cls in classes:
        cls.__module__ = name
        setattr(sys.modules[name], cls.__name__, cls)


def own_config(config: Any) -> Any:
    """Return a config of one layer."""
    return copy.copy(config)


def run_again(module: str, *changes: tuple[str, str]) -> None:
    """Define what a module of transformers defines once more, in place, from its source with `changes`."""
    loaded = importlib.import_module(module)
    with open(loaded.__file__ or "", encoding="utf-8") as file:
        text = file.read()
    assert any(old in text for old, _ in changes), f"{module} has none of {[old for old, _ in changes]}"
    for old, new in changes:
        text = text.replace(old, new)
    exec(compile(text, f"<the next {module}>", "exec"), vars(loaded))
