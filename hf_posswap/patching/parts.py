"""Refusing to swap a part of a living model: the whole, which alone is saved, would not hold the record of the swap.

A module does not know what holds it, and the config of a part is that of the same class by itself. But Python knows who
refers to an object, so the question is put to its garbage collector; that takes a look at every living object, and is
asked only of classes that are parts of others: base models, towers of several modalities, decoders that attend across.
"""

from __future__ import annotations

import gc
from typing import Any

from torch import nn

from hf_posswap.errors import UnsupportedSwapError


def refuse_part(model: Any) -> None:
    """Refuse a `model` that another transformers model holds; in a wrapper that is none, it is saved by itself.

    Raises:
        UnsupportedSwapError: names the whole, and where in it the part lies.
    """
    if not _may_be_part(model) or _holder(model) is None:
        return
    gc.collect()  # of a whole that nobody has any more, garbage may be left
    whole = _holder(model)
    if whole is None:
        return
    part, name = type(model).__name__, type(whole).__name__
    path = next(path for path, module in whole.named_modules() if module is model)
    raise UnsupportedSwapError(
        f"this {part} is {path!r} of a {name}, which would be saved without a record of the swap. What works: the "
        f"whole {name}; or the {part} by itself, as copy.deepcopy or {part}.from_pretrained makes it."
    )


def _may_be_part(model: Any) -> bool:
    config = model.config
    bare = model.base_model is model and model.get_output_embeddings() is None
    return bare or bool(getattr(config, "base_config_key", "")) or bool(getattr(config, "add_cross_attention", False))


def _holder(module: nn.Module) -> Any:
    """Return the outermost transformers model around `module`, or None."""
    from transformers import PreTrainedModel

    found = None
    for parent in _parents(module):
        outer = _holder(parent)
        found = outer or (parent if isinstance(parent, PreTrainedModel) else found)
    return found


def _parents(module: nn.Module) -> list[nn.Module]:
    """Return the modules that have `module` as a child."""
    held = [one for one in gc.get_referrers(module) if type(one) is dict and _holds_modules(one)]
    if not held:
        return []
    owners = [one for found in gc.get_referrers(*held) for one in (found, *_of_attributes(found))]
    ids = {id(children) for children in held}
    parents = {id(one): one for one in owners if isinstance(one, nn.Module) and id(one._modules) in ids}
    return list(parents.values())


def _holds_modules(children: dict[Any, Any]) -> bool:
    return all(one is None or isinstance(one, nn.Module) for one in children.values())


def _of_attributes(found: Any) -> list[Any]:
    """Return whose attributes `found` is, where it is the dict that has a module's children among others."""
    return gc.get_referrers(found) if type(found) is dict and "_modules" in found else []
