"""Wrapped models: what to pass instead, and refusals where a swap would miss a module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_posswap.compat.torch_wrappers import kind_of_wrapper
from hf_posswap.compat.transformers_models import tensor_parallel_size
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.sites import Sites


def what_instead(given: Any) -> str:
    """Return what to pass instead of `given`, which is not a transformers model."""
    from transformers import PreTrainedModel

    if isinstance(given, str | Path):
        return (
            "load the model first, with from_pretrained of transformers, or with hf_posswap.load if it was saved "
            "after a swap"
        )
    if isinstance(given, type):
        return f"give an instance of it, for example from {given.__name__}.from_pretrained(...)"
    if isinstance(given, torch.jit.ScriptModule):
        return "give the model itself, before wrapping or compiling it: a traced model cannot be changed"
    if _wrapper(given) is not None:
        return "give the model itself, before wrapping or compiling it: patch first, then wrap"
    modules = dict(given.named_modules()) if isinstance(given, nn.Module) else getattr(given, "__dict__", {})
    inner = next((path for path, module in modules.items() if isinstance(module, PreTrainedModel)), None)
    if inner is None:
        return "give the model itself, before wrapping or compiling it"
    where = f".get_submodule({inner!r})" if isinstance(given, nn.Module) else f".{inner}"
    return f"give the model itself, before wrapping or compiling it: the {type(modules[inner]).__name__} at {where}"


def refuse_wrapped_parts(model: nn.Module) -> None:
    """Refuse a model with a wrapped submodule or sharded weights: a swap would miss them.

    Raises:
        UnsupportedSwapError: names the first one.
    """
    for path, module in model.named_modules():
        wrapper = _wrapper(module)
        if wrapper is not None:
            raise UnsupportedSwapError(
                f"{path!r} of {type(model).__name__} is in {wrapper}, which hides it. Patch the model first, then wrap "
                "its modules."
            )
    sharded = next((name for name, parameter in model.named_parameters() if hasattr(parameter, "placements")), None)
    if sharded is not None or tensor_parallel_size(model) > 1:
        raise UnsupportedSwapError(
            f"{type(model).__name__} is spread over processes (FSDP2 or tensor parallel"
            f"{f': {sharded!r} is a DTensor' if sharded else ''}), and a swap needs whole weights. Patch the "
            "model first, then shard it."
        )


def refuse_missed(model: nn.Module, sites: Sites) -> None:
    """Refuse a model with an attention module like those of `sites` at another path.

    Raises:
        UnsupportedSwapError: names it.
    """
    listed = {model.get_submodule(path) for stack in sites.stacks for path in stack.attention}
    for stack in sites.stacks:
        types = {(type(model.get_submodule(path)), path.rpartition(".")[2]) for path in stack.attention}
        within = f"{stack.entry}." if stack.entry else ""
        for path, module in model.named_modules(remove_duplicate=False):
            alike = path.startswith(within) and (type(module), path.rpartition(".")[2]) in types
            if alike and module not in listed:
                raise UnsupportedSwapError(
                    f"{path!r} is a {type(module).__name__} like those that would be patched, at a path that family "
                    f"{sites.family.name!r} does not list: it would keep its positions. Patch the model before its "
                    "layers are wrapped or moved."
                )


def _wrapper(module: Any) -> str | None:
    """Return the name of the wrapper that `module` is, or None."""
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript"
    return kind_of_wrapper(module)
