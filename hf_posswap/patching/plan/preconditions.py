"""Models inside something else: what to give instead, and what is refused because a part would be left out."""

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
    """Return what to do about `given`, which is no transformers model."""
    from transformers import PreTrainedModel

    if isinstance(given, str | Path):
        return (
            "load the model first, with from_pretrained of transformers, or with hf_posswap.load where it was saved "
            "after a swap"
        )
    if isinstance(given, type):
        return f"give an instance of it, as {given.__name__}.from_pretrained(...) makes one"
    if isinstance(given, torch.jit.ScriptModule):
        return "give the model itself, before wrapping or compiling it: what was traced cannot be changed"
    if _wrapper(given) is not None:
        return "give the model itself, before wrapping or compiling it: patch first, then wrap"
    modules = dict(given.named_modules()) if isinstance(given, nn.Module) else getattr(given, "__dict__", {})
    held = next((path for path, one in modules.items() if isinstance(one, PreTrainedModel)), None)
    if held is None:
        return "give the model itself, before wrapping or compiling it"
    where = f".get_submodule({held!r})" if isinstance(given, nn.Module) else f".{held}"
    return f"give the model itself, before wrapping or compiling it: the {type(modules[held]).__name__} at {where}"


def refuse_wrapped_parts(model: nn.Module) -> None:
    """Refuse a model of which a part lies in a wrapper or is spread over processes: a swap would miss it.

    Raises:
        UnsupportedSwapError: names the first such part.
    """
    for path, module in model.named_modules():
        wrapper = _wrapper(module)
        if wrapper is not None:
            raise UnsupportedSwapError(
                f"{path!r} of {type(model).__name__} is in {wrapper}, which hides it. Patch the model first and wrap "
                "its parts then."
            )
    sharded = next((name for name, one in model.named_parameters() if hasattr(one, "placements")), None)
    if sharded is not None or tensor_parallel_size(model) > 1:
        raise UnsupportedSwapError(
            f"{type(model).__name__} is spread over processes (FSDP2 or tensor parallel"
            f"{f': {sharded!r} is a DTensor' if sharded else ''}), and a swap is made of whole weights. Patch the "
            "model first and shard it then."
        )


def refuse_missed(model: nn.Module, sites: Sites) -> None:
    """Refuse a model with an attention module that differs from those of `sites` in nothing but where it lies.

    Raises:
        UnsupportedSwapError: names it.
    """
    for stack in sites.stacks:
        kinds = {(type(model.get_submodule(path)), path.rpartition(".")[2]) for path in stack.attention}
        within = f"{stack.entry}." if stack.entry else ""
        for path, module in model.named_modules():
            alike = path.startswith(within) and (type(module), path.rpartition(".")[2]) in kinds
            if alike and not any(path in other.attention for other in sites.stacks):
                raise UnsupportedSwapError(
                    f"{path!r} is a {type(module).__name__} as those that would be patched, at a place that family "
                    f"{sites.family.name!r} does not know: it would keep its positions. Patch the model before its "
                    "layers are wrapped or moved."
                )


def _wrapper(module: Any) -> str | None:
    """Return what kind of wrapper `module` is, or None."""
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript"
    return kind_of_wrapper(module)
