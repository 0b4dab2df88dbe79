"""Patching a model and undoing it; and for the classes of swapped models, restoring a recorded swap."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from hf_posswap.compat.peft_wrappers import original_of
from hf_posswap.compat.torch_tensors import make_fake_as, without_fake_mode
from hf_posswap.compat.transformers_attention import IMPLEMENTATION, can_choose_attention
from hf_posswap.compat.transformers_models import fill_weights, is_initialised, mark_initialised
from hf_posswap.errors import NotPatchedError, RecordError, SchemeError, UnsupportedSwapError
from hf_posswap.families.locating import locate
from hf_posswap.families.modules import is_removed
from hf_posswap.families.rope_config import config_parts
from hf_posswap.patching.apply.applied import (
    AppliedSwap,
    applied_swap,
    check_structure,
    check_untouched,
    fingerprint,
    unread_record,
)
from hf_posswap.patching.apply.guard import changing, set_resizing
from hf_posswap.patching.apply.submodel_guard import guard_saving
from hf_posswap.patching.apply.version_guard import guard_version
from hf_posswap.patching.edits.edit import RelativeChoice, Saved, SiteChoice
from hf_posswap.patching.edits.removed_table import NoPositions
from hf_posswap.patching.edits.restore import bring_into_memory, offloaded_tables
from hf_posswap.patching.plan.adaptation import as_trained
from hf_posswap.patching.plan.plan_swap import (
    SchemeChoice,
    plan_swap,
    refuse_nested_swaps,
    refuse_wrapped_parts,
    unwrap,
)
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.config_class import as_plugin_config
from hf_posswap.patching.record.model_class import (
    Runtime,
    leave_swapped_class,
    native_class,
    run_by,
    stop_if_building,
    take_swapped_class,
)
from hf_posswap.patching.record.record import SwapRecord
from hf_posswap.patching.record.training import NAME as TRAINING
from hf_posswap.patching.sites.attention.edits import AddMechanism
from hf_posswap.patching.sites.attention.function import register_attention
from hf_posswap.patching.sites.embedding.table_edits import BlendedTable, BlendTable
from hf_posswap.schemes.blend import Blend
from hf_posswap.schemes.mechanism import building
from hf_posswap.utils.sentence_models import is_sentence_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_LENGTH_KEY = "max_seq_length"

M = TypeVar("M", bound=nn.Module)


def patch_model(
    model: M,
    scheme: SchemeChoice,
    *,
    max_length: int | None = None,
    site: SiteChoice = "auto",
    relative: RelativeChoice | None = None,
    **options: object,
) -> M:
    """Swap the position mechanism of `model`, in place, and return it.

    `plan_swap` shows what a swap would do, `swap_plan` shows what was done.

    Everything is checked before the model is touched, and the result is checked afterwards (`verify_swap` checks more).
    Only this instance changes: no class and no module of transformers does.

    Args:
        model: a transformers model, or a PEFT model or a SentenceTransformer around one. The `max_seq_length` of a
            SentenceTransformer becomes the plan's `max_length` if that is given or differs from the model's own.
        scheme: an object, or a name with its fields as `options`: see `list_schemes()`. An encoder-decoder gets it in
            both stacks, unless it is a mapping, {"encoder": ..., "decoder": ...}; a stack that it omits stays as it is.
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
        ModelInUseError: a forward of the model is running, or another thread changes it.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> model = patch_model(model, "alibi", max_length=64)
        >>> swap_plan(model).route
        'plugin'
        >>> import torch
        >>> model(torch.zeros(1, 64, dtype=torch.long)).logits.shape
        torch.Size([1, 64, 11])
    """
    target = unwrap(model)
    stop_if_building(target)
    with changing(target, "patch_model"), without_fake_mode():
        plan = plan_swap(target, scheme, max_length=max_length, site=site, relative=relative, **options)
        refusal = next(filter(None, (edit.refusal(target) for edit in plan.edits)), None)
        if refusal is not None:
            raise SchemeError(refusal)
        apply_plan(target, plan, owner=model)
        is_longer = max_length is not None or plan.max_length != plan.sites.geometry.original_length
        if is_longer and is_sentence_model(model):
            _set_sequence_length(model, target, plan.max_length)
    return model


def _set_sequence_length(owner: Any, target: PreTrainedModel, length: int) -> None:
    """Have the SentenceTransformer `owner` of the swapped `target` read `length` tokens; on an error, undo the swap."""
    try:
        modules = [(path, each) for path, each in owner.named_modules() if hasattr(each, "max_seq_length")]
        unsaved = [path for path, each in modules if _LENGTH_KEY not in getattr(each, "config_keys", [_LENGTH_KEY])]
        applied_swap(target).sequence_lengths = (owner.max_seq_length, length, unsaved)
        owner.max_seq_length = length
        for module in map(owner.get_submodule, unsaved):  # else texts are cut at max_position_embeddings after a save
            module.config_keys = [*module.config_keys, _LENGTH_KEY]
    except BaseException:
        _undo(target, applied_swap(target), owner)
        raise


def swap_plan(model: nn.Module) -> SwapPlan:
    """Return the current plan of the swap of `model`: printable, picklable, and JSON in its record.

    Args:
        model: patched, or a PEFT model or a SentenceTransformer around one.

    Raises:
        NotPatchedError: the model carries no swap.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> plan = plan_swap(model, "rope")  # what would be done
        >>> swap_plan(patch_model(model, "rope")) == plan  # what was done
        True
    """
    target = unwrap(model)
    patch = getattr(target, "_posswap", None)
    if patch is None:
        raise NotPatchedError(f"{type(target).__name__} carries no swap: it has no plan.{unread_record(target)}")
    return patch.plan


def apply_plan(model: PreTrainedModel, plan: SwapPlan, owner: nn.Module | None = None) -> None:
    """Apply `plan`, which was made for `model`; on an error, leave the model unchanged.

    Args:
        model: the transformers model.
        plan: of the swap.
        owner: the wrapper of the model (a PEFT model), which gets the new config too.

    Raises:
        UnsupportedSwapError: this version of transformers or torch is untested, and the swap could not be verified.
    """
    guard_version(model, plan, apply_plan)
    register_attention()
    before = fingerprint(model)
    done: list[Saved] = []
    swap = AppliedSwap(plan, model.config, saved=done)
    try:
        _set_config(owner or model, model.config, _own_config(model.config, plan))
        swap.offloaded += [bring_into_memory(model, path) for path in offloaded_tables(model, plan.edits)]
        for edit in plan.edits:
            done.append({})
            edit.apply(model, done[-1])
        swap.guard = guard_saving(model)
        set_resizing(model, plan.named)
        model.__dict__["_posswap"] = swap
        if plan.route == "plugin":
            take_swapped_class(model, [plan.sites.stack(name).attention[0] for name in plan.schemes])
        swap.swapped_config = copy.deepcopy(model.config)
        check_structure(model)
        check_untouched(model, before)
        make_fake_as(model)
    except BaseException:
        _undo(model, swap, owner)
        raise


def unpatch_model(model: M) -> M:
    """Restore the original mechanism of `model`, bit for bit, and return the model.

    Weights trained since the swap keep their values, and so do settings of the config that were made since and that the
    swap did not make; weights that the swap disabled come back unchanged, and so does the `max_seq_length` of a
    SentenceTransformer, unless it was set since.

    Args:
        model: patched in this process, or a PEFT model or a SentenceTransformer around one.

    Raises:
        NotPatchedError: the model carries no swap; or it was loaded from a swapped checkpoint, which lacks the original
            mechanism's weights; or `fit_rotation` has changed its weights.
        UnsupportedSwapError: inference mode is on, or layers were removed since the swap.
        ModelInUseError: a forward of the model is running, or another thread changes it.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> table = model.transformer.wpe
        >>> unpatch_model(patch_model(model, "rope")).transformer.wpe is table
        True
    """
    target = unwrap(model)
    with changing(target, "unpatch_model"), without_fake_mode():
        patch = getattr(target, "_posswap", None)
        if patch is None:
            raise NotPatchedError(f"{type(target).__name__} carries no swap: nothing to undo.{unread_record(target)}")
        if not patch.can_undo:
            raise NotPatchedError(
                f"{type(target).__name__} was loaded from a checkpoint saved after the swap to {patch.plan.named}: "
                "the original mechanism is not in it. Load the base checkpoint instead."
            )
        if patch.fitted:
            raise NotPatchedError(
                f"{type(target).__name__} was fitted to the swap to {patch.plan.named} (fit_rotation): its queries and "
                "keys are no longer those of the original mechanism. Load the base checkpoint instead."
            )
        refuse_wrapped_parts(target)
        refuse_nested_swaps(target)
        _refuse_removed_layers(target, patch)
        _undo(target, patch, owner=model)
        if patch.sequence_lengths is not None and is_sentence_model(model):
            before, swapped, unsaved = patch.sequence_lengths
            for module in map(model.get_submodule, unsaved):
                keys = [key for key in vars(module).pop("config_keys", []) if key != _LENGTH_KEY]
                if keys != module.config_keys:  # that of the class
                    vars(module)["config_keys"] = keys
            if model.max_seq_length == swapped:  # it was not set since
                model.max_seq_length = before
    return model


def _refuse_removed_layers(model: PreTrainedModel, patch: AppliedSwap) -> None:
    path = next((edit.path for edit, _ in patch.done() if is_removed(model, edit.path)), None)
    if path is not None:
        raise UnsupportedSwapError(
            f"{path} of {type(model).__name__} was removed after the swap to {patch.plan.named}, which can no longer "
            "be undone there. Load the base model and remove the layers from it."
        )


@contextmanager
def patched(model: M, scheme: SchemeChoice, **options: Any) -> Iterator[M]:
    """Swap inside a `with` block; the original mechanism is restored afterwards, also if the block raises.

    Args:
        model: as in `patch_model`; `as` yields it.
        scheme: likewise.
        options: the other arguments of `patch_model`: max_length, site, relative, fields of the scheme.

    Raises:
        NotPatchedError: the block undid the swap itself.
        PosswapError: whatever `patch_model` raises, before the block.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> with patched(model, "rope"):
        ...     type(model.transformer.wpe).__name__
        'NoPositions'
        >>> type(model.transformer.wpe).__name__
        'Embedding'
    """
    patch_model(model, scheme, **options)
    try:
        yield model
    finally:
        unpatch_model(model)


def _undo(model: PreTrainedModel, swap: AppliedSwap, owner: nn.Module | None) -> None:
    leave_swapped_class(model)
    set_resizing(model, None)
    for path in offloaded_tables(model, swap.plan.edits):  # offloaded since the swap
        bring_into_memory(model, path)
    if swap.guard is not None:
        swap.guard.remove()
    for edit, saved in reversed(swap.done()):
        edit.undo(model, saved)
    for back in swap.offloaded:
        back(model)
    _keep_later_settings(model, swap)
    _set_config(owner or model, model.config, swap.config)
    model.__dict__.pop("_posswap", None)


def _keep_later_settings(model: PreTrainedModel, swap: AppliedSwap) -> None:
    """Write what was set in the config of `model` since the swap, such as vocab_size, into the config before the swap.

    Values that the swap itself changed are left as they were, and so are those that saving sets (the class's name, the
    dtype), the record of a training, and the attention implementation of a class that cannot choose one without the
    swap.
    """
    if swap.swapped_config is None:
        return
    native, swapped = config_parts(swap.config), config_parts(swap.swapped_config)
    fixed = () if can_choose_attention(model) else (IMPLEMENTATION,)
    for path, current in config_parts(model.config).items():
        if path not in native or path not in swapped:
            continue
        before, after = dict(vars(native[path])), vars(swapped[path])
        for name, value in vars(current).items():
            settled = name in (*(current.sub_configs or ()), "architectures", "dtype", TRAINING) or name.startswith(
                fixed
            )
            if not settled and before.get(name) == after.get(name) != value:
                setattr(native[path], name, copy.deepcopy(value))


def _own_config(config: PreTrainedConfig, plan: SwapPlan) -> PreTrainedConfig:
    """Return a copy of `config` for the swapped model, because other models may share the config object."""
    swapped = copy.deepcopy(config)
    swapped.posswap = plan.record.to_dict()
    if plan.route == "plugin":
        as_plugin_config(swapped)
    return swapped


def _set_config(owner: nn.Module, old: PreTrainedConfig, new: PreTrainedConfig) -> None:
    """Replace config `old` by `new` in `owner` and all its modules, and sub-configs likewise."""
    before, after = config_parts(old), config_parts(new)
    replacements = {id(config): after[path] for path, config in before.items() if path in after}
    module: Any
    for module in owner.modules():
        config = vars(module).get("config")
        if id(config) in replacements:
            module.config = replacements[id(config)]


def restore_swap(model: PreTrainedModel, record: SwapRecord) -> None:
    """Apply the swap of `record` to a freshly built native `model`; its weights are loaded afterwards.

    Raises:
        RecordError: this version of the package would apply a different swap than the recorded one.
    """
    with without_fake_mode():
        stacks = [stack.name for stack in locate(model).stacks]
        plan = plan_swap(model, record.choice(stacks), **record.arguments)
        if plan.route != record.route:
            is_part = len(plan.schemes) < len(record.stacks or plan.schemes)
            raise RecordError(
                f"config.posswap records a {record.route} swap to {plan.named}, but here it would be {plan.route}: "
                + (
                    f"{plan.model} is a part of the model, and the rest decided the route. Load the whole model by "
                    "hf_posswap.load, and take its part from there, by model.get_encoder() or model.get_decoder()."
                    if is_part
                    else "use the version of transformers that the checkpoint was made with."
                )
            )
        apply_plan(model, as_trained(plan, record, model.config))
    if not all(isinstance(scheme, Blend) for scheme in plan.schemes.values()):  # a blend holds the old mechanism too
        applied_swap(model).saved = None


@torch.no_grad()
def initialise(model: PreTrainedModel, module: nn.Module) -> bool:
    """Initialize `module` of a swapped `model`, except for tensors loaded from a checkpoint.

    Returns whether a swap added the module; False if `model` is a submodel without the swap's state.
    """
    patch = getattr(model, "_posswap", None)
    if patch is None:
        return False
    if isinstance(module, NoPositions):
        _begin(module, "weight", torch.zeros_like(module.weight))
    elif isinstance(module, BlendedTable):
        _begin_blended(model, module, patch.plan)
    elif (fresh := _fresh_mechanism(model, module, patch.plan)) is not None:
        for path, submodule in fresh.named_modules():
            for name, start in submodule.named_parameters(recurse=False):
                _begin(module.get_submodule(path), name, start)
    else:
        return False
    for submodule in module.modules():
        mark_initialised(submodule)
    return True


def freeze(model: nn.Module) -> None:
    """Freeze the weights that the swap of the loaded `model` freezes."""
    for edit in applied_swap(model).plan.edits:
        edit.freeze(model)


def _fresh_mechanism(model: PreTrainedModel, module: nn.Module, plan: SwapPlan) -> nn.Module | None:
    """Return a new mechanism like `module` if it is one of the plan's; else None."""
    for edit in plan.edits:
        if isinstance(edit, AddMechanism):
            carried = model.get_submodule(edit.path)
            if module is original_of(carried):  # PEFT wraps fully trained modules
                with building():
                    return edit.scheme.mechanism(edit.geometry)
    return None


def _begin_blended(model: PreTrainedModel, module: BlendedTable, plan: SwapPlan) -> None:
    module.native.weight = module.old
    fill_weights(native_class(type(model)), model, module.native)
    _begin(module, "weight", torch.zeros_like(module.weight))
    for edit in plan.edits:
        if module.new is not None and isinstance(edit, BlendTable):
            if model.get_submodule(edit.path) is module:
                new = edit.new_rows(module.old)
                assert new is not None
                _begin(module, "new", new)


def _begin(module: nn.Module, name: str, start: Tensor) -> None:
    """Write `start` into a parameter or buffer of `module`, unless a checkpoint has filled it."""
    tensor: Tensor = getattr(module, name)
    if not is_initialised(tensor) and not tensor.is_meta:
        tensor.copy_(start)
        mark_initialised(tensor)  # stock modules fill tensors of their children


run_by(Runtime(restore_swap, initialise, freeze))
