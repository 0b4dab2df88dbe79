"""What a model must be for a swap: not wrapped, not swapped in a part of it, and of a kind that the scheme is for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_posswap.compat.torch_modules import kind_of_wrapper
from hf_posswap.compat.transformers_models import tensor_parallel_size
from hf_posswap.errors import AlreadyPatchedError, SchemeError, UnsupportedSwapError
from hf_posswap.families.modules import matching
from hf_posswap.families.sites import Sites, Stack
from hf_posswap.patching.record.model_class import is_part
from hf_posswap.patching.record.record import native_config_class
from hf_posswap.patching.sites.attention.native import native_scheme
from hf_posswap.schemes.base import Scheme, schemes_for
from hf_posswap.schemes.learned import Learned
from hf_posswap.schemes.nope import NoPE
from hf_posswap.schemes.sum import Sum

_DOES = {"text": "reads text", "images": "sees images"}
_FOR_TEXT = "rope, alibi, and where there is a position table sinusoidal, learned"


def what_instead(given: object) -> str:
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
    advice = f"give the model itself, before wrapping or compiling it: the {type(modules[inner]).__name__} at {where}"
    for name in ("max_seq_length", "max_length"):  # of sentence-transformers' CrossEncoder and SparseEncoder
        if isinstance(length := getattr(given, name, None), int):
            return f"{advice}. Then set .{name} of the {type(given).__name__}: it cuts texts at {length} tokens"
    return advice


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
    root = model.get_submodule(sites.base)
    listed = {model.get_submodule(path) for stack in sites.stacks for path in stack.attention}
    listed |= {root.get_submodule(path) for stack in sites.stacks for path in matching(root, stack.spec.cross)}
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


def refuse_nested_swaps(model: nn.Module) -> None:
    """Refuse a `model` that contains a swapped submodel, or that belongs to a swapped outer model.

    Raises:
        AlreadyPatchedError: names the submodel, or says that the outer model carries a swap.
    """
    name = type(model).__name__
    inner = next((path for path, module in model.named_modules() if path and "_posswap" in vars(module)), None)
    if inner is not None:
        submodel: Any = model.get_submodule(inner)
        raise AlreadyPatchedError(
            f"{inner!r} of this {name} already carries {submodel._posswap.plan.named}: call "
            f"unpatch_model(model.get_submodule({inner!r})) first."
        )
    if "_posswap" in vars(model):
        return
    if is_part(model) or native_config_class(model.config) is not type(model.config):
        record = getattr(model.config, "posswap", None)  # a tower's config has none
        to = "" if record is None else f", to {record['scheme']['name']}"
        raise AlreadyPatchedError(
            f"this {name} is a part of a model that carries a swap{to}: call unpatch_model on the whole model first."
        )


def with_native(model: nn.Module, stack: Stack, scheme: Scheme) -> Scheme:
    """Return `scheme` with what a model of this `stack` has in the place of `native`; a rotation stays `native`.

    Raises:
        SchemeError: the scheme is only a term of a sum.
        UnsupportedSwapError: what the model has cannot be a term of a sum.
    """
    if not scheme.standalone:
        adding = (
            "one to it, as in native + alibi" if scheme.keeps_native else f"it to one, as in native + {scheme.name}"
        )
        raise SchemeError(
            f"{scheme.name} ({scheme.summary}) is no scheme by itself. Add {adding} (in Python, native() + ...)."
        )
    if not scheme.keeps_native:
        return scheme
    assert isinstance(scheme, Sum)
    if stack.inputs == "images":
        raise UnsupportedSwapError(
            f"{type(model).__name__} sees images, and native stands for what a model that reads text has. What works: "
            f"{', '.join(schemes_for('images'))}."
        )
    if stack.table is not None and (stack.rotary or stack.inside is not None):
        raise UnsupportedSwapError(
            f"{type(model).__name__} has positions both in a table and inside attention, so which of them native would "
            "keep is not clear. What works: a sum that names its terms, as rope + alibi."
        )
    if stack.rotary and stack.inside is None:
        return scheme
    if stack.inside is not None:
        return scheme.with_native(native_scheme(stack.inside, stack.geometry))
    if stack.table is None:
        raise UnsupportedSwapError(
            f"{type(model).__name__} has no position mechanism that native could keep. What works: the other terms."
        )
    return scheme.with_native(Learned())


def refuse_other_input(model: nn.Module, stack: Stack, scheme: Scheme) -> None:
    """Refuse a text scheme in a vision `stack` and vice versa, also as part of `scheme`.

    Raises:
        UnsupportedSwapError: the scheme does not suit; the message says what works.
    """
    for inner in all_in(scheme):
        if stack.inputs not in inner.inputs:
            takes, suits = _DOES[stack.inputs], _DOES[inner.inputs[0]]
            works = _FOR_TEXT if stack.inputs == "text" else ", ".join(schemes_for("images"))
            raise UnsupportedSwapError(
                f"{inner.name} is for a model that {suits}, and {type(model).__name__} {takes}. What works: {works}."
            )
        if stack.inputs == "images" and isinstance(inner, NoPE) and inner.acts_inside:
            raise UnsupportedSwapError(
                f"{inner.name} with logit_scale follows the length of a text, and {type(model).__name__} sees images. "
                "What works: nope without it."
            )


def refuse_length(model: nn.Module, stack: Stack, scheme: Scheme, max_length: int | None) -> None:
    """Refuse a `max_length` for a vision `stack`: its length follows from the image size.

    Raises:
        SchemeError: it differs from the length that follows from the image size of the resolved `scheme`.
    """
    length = scheme.reach(stack.geometry) or stack.geometry.original_length
    if stack.inputs == "images" and max_length not in (None, length):  # records contain that length
        sized = " or give image_size, in pixels," if hasattr(scheme, "image_size") else ""
        raise SchemeError(
            f"{type(model).__name__} sees images: its length follows from their size, {length} tokens here, got "
            f"max_length={max_length}. Leave it out,{sized} images of other sizes run after the swap."
        )


def refuse_no_table(model: nn.Module, stack: Stack, scheme: Scheme) -> None:
    """Refuse a table scheme, also as part of `scheme`, if the `stack` has no position table.

    Raises:
        UnsupportedSwapError: it is one, whatever its length.
    """
    tables = [inner.table_part for inner in all_in(scheme) if inner.table_part is not None]
    if tables and stack.table is None:
        raise UnsupportedSwapError(
            f"{tables[0].name} needs a position table, and {type(model).__name__} has none. What works: "
            "rope and its scalings, alibi, and in a causal model nope."
        )


def refuse_two_sided(model: nn.Module, stack: Stack, scheme: Scheme) -> None:
    """Refuse a scheme that needs a causal model in a bidirectional `stack`.

    Raises:
        UnsupportedSwapError: it is one.
    """
    if stack.geometry.causal or not scheme.traits.causal_only or stack.inputs == "images":
        return
    whole = type(model).__name__
    needing = [inner.name for inner in all_in(scheme) if inner.traits.causal_only]  # what combines schemes comes first
    given = f'"{scheme.name}"' if len(needing) == 1 else "the same scheme"
    raise UnsupportedSwapError(
        f"{needing[-1]} needs a causal model; {f'the {stack.name} of ' if stack.name else ''}{whole} sees both sides. "
        f"What works: {_FOR_TEXT}"
        + (f'; or {{"decoder": {given}}}, which leaves the {stack.name} as it is.' if stack.name else ".")
    )


def all_in(scheme: Scheme) -> Iterator[Scheme]:
    """Yield `scheme` and every scheme inside it."""
    pending: list[object] = [scheme]
    while pending:
        value = pending.pop()
        if isinstance(value, Scheme):
            yield value
            pending += [getattr(value, field.name) for field in dataclasses.fields(value)]
        elif isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, tuple):
            pending += value
