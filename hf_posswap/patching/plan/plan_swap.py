"""Planning a swap: what a model must be for it, the router between the three sites, passes over the whole model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hf_posswap.compat.torch_modules import kind_of_wrapper
from hf_posswap.compat.torch_tensors import without_fake_mode
from hf_posswap.compat.transformers_models import tensor_parallel_size
from hf_posswap.errors import AlreadyPatchedError, OptionError, SchemeError, UnsupportedSwapError
from hf_posswap.families.locating import locate
from hf_posswap.families.modules import matching
from hf_posswap.families.rope_config import config_at
from hf_posswap.families.sites import Sites, Stack
from hf_posswap.patching.edits.edit import PlanDraft, RelativeChoice, SiteChoice, SwapContext
from hf_posswap.patching.edits.restore import KEPT_IN_MEMORY, offloaded_tables
from hf_posswap.patching.edits.settings import EditConfig
from hf_posswap.patching.plan.adaptation import adaptation_of
from hf_posswap.patching.plan.length_state import plan_length_state
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.model_class import is_part
from hf_posswap.patching.record.record import LONGEST, SwapRecord, native_config_class
from hf_posswap.patching.record.refusals import stock_name
from hf_posswap.patching.sites.attention.native import (
    native_scheme,
    plan_attn_implementation,
    plan_relative,
    relative_choice,
)
from hf_posswap.patching.sites.attention.plan import plan_attention, plan_longer_masks
from hf_posswap.patching.sites.attention.positions import plan_position_ids, plan_unclaimed_ids
from hf_posswap.patching.sites.embedding.plan import fitted, plan_embedding, plan_saved_tables
from hf_posswap.patching.sites.rotary.plan import plan_rotary
from hf_posswap.schemes.base import Scheme, Traits, make_scheme, names_one_scheme, scheme_class, schemes_for
from hf_posswap.schemes.blend import Blend
from hf_posswap.schemes.learned import Learned
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.schemes.nope import NoPE
from hf_posswap.schemes.sum import Sum
from hf_posswap.utils.format import brief
from hf_posswap.utils.printable import brief_repr
from hf_posswap.utils.sentence_models import inner_model, is_sentence_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


SchemeChoice = Scheme | str | Mapping[str, Any]
"""A scheme, its name, or a mapping of an encoder-decoder's stacks to schemes."""


def plan_swap(
    model: PreTrainedModel,
    scheme: SchemeChoice,
    *,
    max_length: int | None = None,
    site: SiteChoice = "auto",
    relative: RelativeChoice | None = None,
    **options: object,
) -> SwapPlan:
    """Return what `patch_model` with the same arguments would do. The model is not touched; it may be on meta.

    Args:
        model: a transformers model, or a PEFT model or a SentenceTransformer around one.
        scheme: an object, or a name with its fields as `options`; for an encoder-decoder also a mapping of its stacks
            to schemes, {"encoder": ..., "decoder": ...}: a stack that it omits keeps its mechanism.
        max_length: positions the swapped model is meant for, in tokens; None keeps the model's own (or what a given
            factor reaches).
        site: "auto" expresses the swap natively where it can be; "attention" always applies it inside attention.
        relative: whether to "keep" or "drop" DeBERTa's relative positions inside attention; None keeps them. Other
            models take only None.
        options: fields of the scheme, if it is given by name.

    Raises:
        UnsupportedSwapError: this model does not support the scheme; the message says why, and what would work.
        UnsupportedModelError: no family describes the model.
        SchemeError, OptionError, UnknownNameError: the scheme or its parameters are wrong.
        AlreadyPatchedError: the model carries a swap.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> plan = plan_swap(model, "rope", max_length=64)
        >>> plan.route, [edit.path for edit in plan.edits][:2]
        ('plugin', ['transformer.wpe', 'transformer.posswap'])
    """
    max_length = int(max_length) if isinstance(max_length, np.integer) else max_length
    with without_fake_mode():
        return _planned(unwrap(model), scheme, max_length, site, relative, options)


def _planned(
    model: PreTrainedModel,
    scheme: SchemeChoice,
    max_length: int | None,
    site: SiteChoice,
    relative: RelativeChoice | None,
    options: Mapping[str, object],
) -> SwapPlan:
    _check_arguments(model, max_length, site)
    refuse_wrapped_parts(model)
    refuse_nested_swaps(model)
    sites = locate(model)
    _refuse_config_of_decoder(model, sites)
    refuse_missed(model, sites)
    schemes = _resolved(model, sites, schemes_by_stack(scheme, sites, options), max_length)
    length = max_length or max(
        resolved.reach(sites.stack(name).geometry) or sites.stack(name).geometry.original_length
        for name, resolved in schemes.items()
    )
    if length > LONGEST:
        raise SchemeError(
            f"{', '.join(map(str, schemes.values()))}: the model would be meant for {length} tokens; the maximum is "
            f"{LONGEST}. Give a smaller max_length or factor."
        )
    relative = relative_choice(model, sites, relative)
    contexts = [
        SwapContext(model, sites, sites.stack(name), resolved, length, site, relative)
        for name, resolved in schemes.items()
    ]
    return _plan([replace(context, scheme=fitted(context)) for context in contexts])


def _refuse_config_of_decoder(model: PreTrainedModel, sites: Sites) -> None:
    """Refuse an encoder-decoder that was built from the config of a decoder-only model."""
    has_both = {"encoder", "decoder"} <= {stack.name for stack in sites.stacks}
    if not has_both or getattr(model.config, "is_encoder_decoder", True):
        return
    named = [stock_name(name) for name in model.config.architectures or ()]
    of = f", like that of {named[0]}" if named else ""
    raise UnsupportedSwapError(
        f"{type(model).__name__} has an encoder and a decoder, and its config has is_encoder_decoder: false{of}: that "
        "is a decoder-only model, whose checkpoint has no encoder weights. Load such a "
        "checkpoint with hf_posswap.load or AutoModelForCausalLM; for a new model set is_encoder_decoder to true."
    )


def _check_arguments(model: PreTrainedModel, max_length: int | None, site: SiteChoice) -> None:
    carried = getattr(model, "_posswap", None)
    if carried is not None:
        raise AlreadyPatchedError(
            f"{type(model).__name__} already carries {carried.plan.named}: call unpatch_model(model) first."
        )
    if site not in ("auto", "attention"):
        raise UnsupportedSwapError(f"site must be 'auto' or 'attention', got {site!r}.")
    check_max_length(max_length)


def check_max_length(max_length: int | None) -> None:
    """Raise a SchemeError if `max_length` is given and is not a number of tokens."""
    if max_length is not None and (isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1):
        raise SchemeError(f"max_length must be a whole number of tokens >= 1, got {max_length!r}.")


def _resolved(
    model: PreTrainedModel, sites: Sites, chosen: dict[str, Scheme], max_length: int | None
) -> dict[str, Scheme]:
    """Return the schemes with their open parameters filled in, or refuse those that do not suit their stacks."""
    chosen = {name: with_native(model, sites.stack(name), scheme) for name, scheme in chosen.items()}
    for name, scheme in chosen.items():
        for inner in reversed([*all_in(scheme)]):  # what combines schemes reads the traits of those inside it
            _refuse_other_type(inner, "traits", inner.traits, Traits)
        refuse_other_input(model, sites.stack(name), scheme)
        refuse_two_sided(model, sites.stack(name), scheme)
        refuse_no_table(model, sites.stack(name), scheme)
    resolved = {name: scheme.resolve(sites.stack(name).geometry, max_length) for name, scheme in chosen.items()}
    for name, scheme in resolved.items():
        geometry = sites.stack(name).geometry
        _refuse_other_type(chosen[name], "resolve", scheme, Scheme)
        _refuse_other_type(scheme, "notes", scheme.notes(), tuple | list)
        _refuse_other_type(scheme, "reach", scheme.reach(geometry), int | None)
        if scheme.acts_inside:
            _refuse_other_type(scheme, "mechanism", scheme.mechanism(geometry), Mechanism)
        refuse_length(model, sites.stack(name), scheme, max_length)
    return resolved


def _refuse_other_type(scheme: Scheme, method: str, value: object, expected: type | UnionType) -> None:
    if not isinstance(value, expected):
        raise SchemeError(
            f"{scheme.name}: {method} of {type(scheme).__name__} gives {brief_repr(value)}, expected a value of type "
            f"{getattr(expected, '__name__', expected)}. See hf_posswap.schemes.Scheme for what each method returns."
        )


def schemes_by_stack(scheme: SchemeChoice, sites: Sites, options: Mapping[str, object]) -> dict[str, Scheme]:
    """Return the scheme of every stack to swap, by stack name, the main stack last.

    Raises:
        SchemeError: a mapping names an unknown stack, or no stack.
        OptionError: options were given with a mapping.
    """
    names = [stack.name for stack in sites.stacks]
    if (
        not isinstance(scheme, Mapping)
        or not scheme
        or names_one_scheme(scheme)
        or not all(isinstance(k, str) for k in scheme)
    ):
        return dict.fromkeys(names, make_scheme(scheme, **options))
    if options:
        raise OptionError(f"options {sorted(options)} were given with schemes by stack: set them on the schemes.")
    unknown = [name for name in scheme if name not in names]
    if unknown or names == [""]:
        stacks = ", ".join(names) if names != [""] else "one stack only, without a name"
        if names == [""] and not {"encoder", "decoder"} & set(scheme):
            return {"": make_scheme(scheme)}  # says what is missing in the dict of a scheme
        raise SchemeError(
            f"schemes were given by stack, for {', '.join(scheme)}; this model has {stacks}. A dict that is one scheme "
            "has its name under 'name'."
        )
    return {name: make_scheme(scheme[name]) for name in names if name in scheme}


def _plan(contexts: list[SwapContext]) -> SwapPlan:
    """Return the plan of a swap from the contexts of its stacks, the main one last."""
    drafts = [plan_stack(context) for context in contexts]
    draft = sum(drafts, PlanDraft())
    for add in _PASSES:
        draft += add(contexts, draft)
    main, schemes = contexts[-1], {context.stack.name: context.scheme for context in contexts}
    needs: dict[str, str] = {}
    for context, stack_draft in zip(contexts, drafts, strict=True):
        needs.setdefault(stack_draft.adaptation, context.stack.name)
    notes = dict.fromkeys(note for scheme in schemes.values() for note in scheme.notes())
    return SwapPlan(
        model=main.model_name,
        scheme=main.scheme,
        schemes=schemes,
        edits=tuple(draft.edits),
        route="plugin" if draft.plugin else "native",
        cached_equals_full=all(scheme.traits.prefix_consistent for scheme in schemes.values()),
        unused=draft.unused,
        added=draft.added,
        adaptation="; ".join(f"{name}: {need}" if len(needs) > 1 else need for need, name in needs.items()),
        max_length=main.length,
        notes=(*draft.notes, *notes),
        record=_record(contexts, draft),
        sites=main.sites,
    )


def plan_stack(context: SwapContext) -> PlanDraft:
    """Return the edits for the scheme of `context` in its stack, site by site."""
    stack, draft = context.stack, PlanDraft()
    if stack.config_name is not None:
        draft.values[stack.config_name] = stack.config_length(context.length)
    draft += plan_embedding(context)
    draft += (rotary := plan_rotary(context))
    if _needs_attention(context, rotary):
        draft += plan_attention(context)
    _refuse_blend(context)  # where nothing else refuses its new scheme
    draft += plan_longer_masks(context, draft.edits)
    relative = plan_relative(context)
    draft.adaptation = relative.adaptation or draft.adaptation or adaptation_of(context)
    return draft + relative


def _needs_attention(context: SwapContext, rotary: PlanDraft) -> bool:
    """Return whether the swap changes attention: adds a mechanism there, or removes one."""
    scheme, stack = context.scheme, context.stack
    if isinstance(scheme, Blend):
        return stack.table is None or scheme.new.acts_inside
    if stack.inputs == "images" or scheme.table_part is not None:
        return scheme.acts_inside
    if stack.inside is not None:
        return True
    return rotary.plugin if stack.rotary else scheme.acts_inside or context.site == "attention"


def _refuse_blend(context: SwapContext) -> None:
    scheme, stack = context.scheme, context.stack
    if not isinstance(scheme, Blend):
        return
    if stack.inside is not None:
        native = native_scheme(stack.inside, context.geometry).name
        raise UnsupportedSwapError(
            f"{scheme.name} cannot combine with the native {native} inside the attention of "
            f"{context.model_name}, which is either on or off. What works: {scheme.new.name} without blend."
        )
    if stack.rotary and replace(context, scheme=scheme.new).replaced_types != context.replaced_types:
        raise UnsupportedSwapError(
            f"{scheme.name} fades one set of angles, and layers of {context.model_name} turn by several: only those of "
            f"type {', '.join(context.replaced_types)} would fade, and {scheme.new.name} replaces the rotation of all. "
            f"What works: {scheme.new.name} without blend, or a blend into a rotation (rope, yarn)."
        )


def _left_alone(contexts: list[SwapContext], draft: PlanDraft) -> PlanDraft:
    """Note the stacks that keep their mechanism; if their tables have another length, no config can express both."""
    sites, swapped = contexts[-1].sites, {context.stack.name for context in contexts}
    unswapped = PlanDraft(notes=[sites.family.note] if sites.family.note else [])
    for stack in sites.stacks:
        if stack.name in swapped:
            continue
        unswapped.notes.append(f"The {stack.name} keeps its positions, {stack.geometry.original_length} of them.")
        current = stack.config_length(stack.geometry.original_length)
        if stack.config_name is not None and draft.values.get(stack.config_name, current) != current:
            unswapped.plugin = True
    return unswapped


def _config(contexts: list[SwapContext], draft: PlanDraft) -> PlanDraft:
    """Plan the config values that change."""
    context, planned = contexts[-1], PlanDraft()
    for path, value in draft.values.items():
        before = config_at(context.model.config, path)
        if before != value:
            text = {"before": brief(before), "after": brief(value), "stack": context.stack.name}
            planned.edits.append(EditConfig(site="config", path=path, **text, value=value))
    return planned


def _position_ids(contexts: list[SwapContext], draft: PlanDraft) -> PlanDraft:
    """Plan to obey or refuse position ids that the model's own code silently drops."""
    swapped, planned = {context.stack.name: context for context in contexts}, PlanDraft()
    for stack in contexts[-1].sites.stacks:
        context = swapped.get(stack.name)
        if context is not None and context.scheme.kind == "none":
            continue  # it has no positions
        counts = context is None or _counts(context)
        stack_context = context or replace(contexts[-1], stack=stack)
        planned += plan_position_ids(stack_context, counts=counts, native=not draft.plugin)
    return planned + plan_unclaimed_ids(contexts[-1])


def _counts(context: SwapContext) -> bool:
    """Return whether the model itself counts positions after the swap: for a table, or if no scheme acts inside."""
    if isinstance(context.scheme, Blend):
        return context.stack.table is not None
    if context.scheme.keeps_native:
        return True
    return context.scheme.table_part is not None or not context.scheme.acts_inside


def _kept_in_memory(contexts: list[SwapContext], draft: PlanDraft) -> PlanDraft:
    """Note the tables that are offloaded."""
    paths = offloaded_tables(contexts[-1].model, draft.edits)
    return PlanDraft(notes=[KEPT_IN_MEMORY.format(path) for path in paths])


_PASSES: tuple[Callable[[list[SwapContext], PlanDraft], PlanDraft], ...] = (
    _left_alone,
    plan_saved_tables,
    plan_length_state,
    _config,
    _position_ids,
    plan_attn_implementation,
    _kept_in_memory,
)
"""The passes over the whole model after its stacks are planned: each takes the draft so far and adds to it."""


def _record(contexts: list[SwapContext], draft: PlanDraft) -> SwapRecord:
    main = contexts[-1]
    stacks = {context.stack.name: context.scheme.to_dict() for context in contexts}
    return SwapRecord(
        scheme=main.scheme.to_dict(),
        route="plugin" if draft.plugin else "native",
        base_type=main.model.config.model_type,
        max_length=main.length,
        site=main.site,
        original={path: config_at(main.model.config, path) for path in draft.values},
        stacks=stacks if main.stack.name else None,
        relative=main.relative,
        imports=foreign_modules(stacks) or None,
    )


def foreign_modules(value: object) -> dict[str, str]:
    """Return the modules of other packages that register the schemes in `value`, by the name of the scheme.

    Args:
        value: what `Scheme.to_dict` gave, or JSON with such in it.
    """
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    modules: dict[str, str] = {}
    for child in children:
        modules |= foreign_modules(child)
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        module = scheme_class(value["name"]).__module__
        if module.partition(".")[0] != __name__.partition(".")[0]:
            modules[value["name"]] = module
    return modules


def unwrap(model: Any) -> PreTrainedModel:
    """Return the transformers model inside `model`: itself, the base of a PEFT model, or that of a SentenceTransformer.

    Raises:
        UnsupportedSwapError: `model` is not a transformers model, a SentenceTransformer with none or several of them,
            or a PEFT method that adds virtual tokens.
    """
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return model
    if is_sentence_model(model):
        return unwrap(inner_model(model))
    configs = getattr(model, "peft_config", None)
    if configs is not None and hasattr(model, "get_base_model"):
        if any(getattr(config, "is_prompt_learning", False) for config in configs.values()):
            raise UnsupportedSwapError("PEFT prompt learning adds tokens without positions: not supported.")
        return unwrap(model.get_base_model())
    given = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    raise UnsupportedSwapError(
        f"expected a transformers PreTrainedModel (or a PEFT model or SentenceTransformer around one), got {given}; "
        f"{what_instead(model)}."
    )


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
            f"{scheme.name} ({scheme.summary}) is not a scheme by itself. Add {adding} (in Python, native() + ...)."
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
