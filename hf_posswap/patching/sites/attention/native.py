"""Positions that are native inside attention: kept, or taken away; and the edits that make a class ready for others."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from hf_posswap.compat.torch_modules import give_class
from hf_posswap.compat.torch_tensors import holds_values
from hf_posswap.compat.transformers_attention import (
    can_choose_attention,
    let_choose_attention,
    let_class_choose_attention,
)
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.base import NativeScheme, RelativePart
from hf_posswap.families.modules import get, join, matching, owner_of, replace_everywhere
from hf_posswap.families.rope_config import config_at
from hf_posswap.families.sites import Sites, Stack
from hf_posswap.geometry import Geometry
from hf_posswap.patching.edits.edit import (
    AppliedAgain,
    BuiltByConfig,
    Edit,
    PlanDraft,
    PluginOnly,
    Saved,
    SwapContext,
    TouchesModule,
    TouchesNothing,
)
from hf_posswap.patching.edits.removed_table import NoPositions, not_zero
from hf_posswap.patching.edits.restore import replace_child, restore_child, stored
from hf_posswap.patching.edits.settings import SetAttribute
from hf_posswap.patching.record.refusals import SENTINEL_SHAPE
from hf_posswap.schemes.base import Scheme, make_scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NATIVE_POSITIONS = "native_positions"
"""Attribute of an attention class: whether it applies the positions that its original applies inside attention."""


def native_scheme(inside: NativeScheme, geometry: Geometry) -> Scheme:
    """Return the position mechanism that is native inside attention as a resolved scheme."""
    return make_scheme(dict(inside)).resolve(geometry, None)


def interface_edits(context: SwapContext, *, native_positions: bool) -> list[Edit]:
    """Return the edits after which a stack attends through the interface.

    Args:
        context: of the stack.
        native_positions: whether positions that are native inside attention stay.

    Raises:
        UnsupportedSwapError: an attention module is of a class that no interface class is known to equal, or this
            release of transformers lacks what that class is made from.
    """
    model, stack, traits = context.model, context.stack, context.stack.spec.traits
    if traits is None:
        return []
    why = None if traits.closed is None else traits.closed(model.config)
    if why is not None:
        raise UnsupportedSwapError(f"nothing can be put inside the attention of {context.model_name}: {why}.")
    edits: list[Edit] = []
    for path in () if native_positions else rows_of(context):
        _refuse_other_sinusoids(path, model.get_submodule(path))
    if traits.switch is not None and not native_positions:
        below, name = traits.switch
        edits.append(_switch_off(context, join(context.sites.base, below), name))
    if traits.angles and not native_positions:
        edits += _stop_rotation(context, traits.angles)
    for layer, path in enumerate(stack.attention if traits.interface else ()):
        interface_class = _interface_of(traits.interface, path, model.get_submodule(path))  # type: ignore[arg-type]
        if isinstance(interface_class, str):
            raise UnsupportedSwapError(f"{path}: {interface_class}")
        if interface_class is not type(model.get_submodule(path)):
            edits.append(_through_interface(context, path, interface_class, layer, native_positions=native_positions))
    return edits


def _interface_of(find: Callable[[nn.Module], type | str], path: str, module: nn.Module) -> type | str:
    try:
        return find(module)
    except (ImportError, AttributeError) as error:  # classes and functions of transformers that were moved or renamed
        raise UnsupportedSwapError(
            f"{path}: this release of transformers lacks what its attention with the interface is made from ({error}), "
            "so a scheme cannot be put inside. Install a release that hf_posswap was tested with."
        ) from error


def _switch_off(context: SwapContext, path: str, name: str) -> Edit:
    return SetAttribute(
        site="attention",
        path=join(path, name),
        before="True",
        after="False",
        stack=context.stack.name,
        module=path,
        name=name,
        value=False,
    )


def _stop_rotation(context: SwapContext, below: str) -> list[Edit]:
    path = join(context.sites.base, below)
    if get(context.model, path) is None:  # a release in which each attention module has its own angles
        return []
    before = native_scheme(context.stack.inside, context.geometry).name if context.stack.inside else "rotation"
    return [StopRotation(site="attention", path=path, before=before, after="identity", stack=context.stack.name)]


def _through_interface(context: SwapContext, path: str, cls: type, layer: int, *, native_positions: bool) -> Edit:
    stack = context.stack
    return AttendThroughInterface(
        site="attention",
        path=path,
        before="no interface" if stack.inside is None else native_scheme(stack.inside, stack.geometry).name,
        after=f"{cls.__name__}, through the AttentionInterface",
        stack=stack.name,
        module=cls.__module__,
        name=cls.__name__,
        layer=layer,
        native_positions=native_positions,
    )


def rows_of(context: SwapContext) -> list[str]:
    """Return the paths of the embeddings from which the positions native inside attention are made."""
    traits = context.stack.spec.traits
    return [] if traits is None or not traits.made_from else list(_paths(context, (traits.made_from,)))


def is_native(context: SwapContext) -> bool:
    """Return whether the scheme is the one that is native inside attention."""
    inside = context.stack.inside
    return inside is not None and context.scheme == native_scheme(inside, context.geometry)


def _refuse_other_sinusoids(path: str, embedding: Any) -> None:
    """Refuse a frozen table of sinusoids that does not hold what its class computes: the native angles are unknown."""
    if not hasattr(embedding, "create_weight") or not holds_values(stored(embedding, "weight")):
        return
    if not torch.allclose(stored(embedding, "weight").float().cpu(), embedding.create_weight().float(), atol=1e-2):
        raise UnsupportedSwapError(
            f"{path} holds other numbers than the sinusoids that {type(embedding).__name__} computes, so the angles by "
            "which this model turns are unknown. What works: a checkpoint whose table was never changed."
        )


@dataclass(frozen=True, kw_only=True)
class AttendThroughInterface(AppliedAgain, TouchesNothing):
    """Makes an attention module attend through the AttentionInterface.

    Attributes:
        module: that defines the class: a subclass of the attention module's own, with the interface.
        name: of the class.
        layer: of the cache that it writes.
        native_positions: whether positions that are native inside attention stay.
    """

    module: str
    name: str
    layer: int
    native_positions: bool

    @property
    def cls(self) -> Any:
        """The class with the interface."""
        return getattr(importlib.import_module(self.module), self.name)

    def apply(self, model: PreTrainedModel, saved: Saved) -> None:
        module, cls = model.get_submodule(self.path), self.cls
        wanted = {"config": model.config, "layer_idx": self.layer}
        given = {name: value for name, value in wanted.items() if not hasattr(module, name)}
        if hasattr(cls, NATIVE_POSITIONS) and not self.native_positions:
            given[NATIVE_POSITIONS] = False
        saved |= {"native": type(module), "given": tuple(given)}
        give_class(module, cls)
        for name, value in given.items():
            setattr(module, name, value)

    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        """Give the module its own class back, and take away the attributes that it was given."""
        if "native" not in saved:
            return
        module = model.get_submodule(self.path)
        for name in saved["given"]:
            vars(module).pop(name, None)
        give_class(module, saved["native"])

    def check(self, model: PreTrainedModel) -> str | None:
        module = model.get_submodule(self.path)
        if not isinstance(module, self.cls):
            return f"its class is {type(module).__name__} instead of {self.name}"
        positions = getattr(module, NATIVE_POSITIONS, self.native_positions)
        return None if positions == self.native_positions else "its native positions are in force again"


class AtPositionZero(nn.Module):
    """A module that makes angles, with every token at position 0: the identity rotation, at any length.

    Args:
        native: the model's own module, which is called with zeros instead of positions; `unpatch_model` restores it.
    """

    def __init__(self, native: nn.Module) -> None:
        super().__init__()
        self.native = native

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Return what `native` returns for position 0 everywhere."""
        return self.native(*map(_at_zero, args), **{name: _at_zero(value) for name, value in kwargs.items()})


def _at_zero(value: Any) -> object:
    counts = isinstance(value, Tensor) and not value.is_floating_point()
    return torch.zeros_like(value) if counts else value


@dataclass(frozen=True, kw_only=True)
class StopRotation(PluginOnly, TouchesNothing):
    """Has the module that makes the angles of positions inside attention make those of position 0 alone."""

    def apply(self, model: PreTrainedModel, saved: Saved) -> None:
        replace_child(model, self.path, AtPositionZero(model.get_submodule(self.path)), saved)

    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        replaced = model.get_submodule(self.path)
        if isinstance(replaced, AtPositionZero):
            replace_everywhere(model, self.path, replaced.native)

    def check(self, model: PreTrainedModel) -> str | None:
        stopped = isinstance(model.get_submodule(self.path), AtPositionZero)
        return None if stopped else "the native rotation is in force again"


class NoRows(NoPositions):
    """Stands where an embedding was from which a model makes positions inside attention; all its rows are zero.

    Args:
        weight: one lone zero, [1]: the native class fails to load it with a size mismatch; or zeros, [P, W].
        width: W, of a row.
    """

    def __init__(self, weight: Tensor, width: int) -> None:
        super().__init__(weight)
        self.width = width

    def forward(self, index: object = None, *_: object, **__: object) -> Tensor:
        """Return zeros, [..., W] for an `index` [...], or one row [1, W] where the model gives no index."""
        if isinstance(index, Tensor):
            return self.weight.new_zeros((*index.shape, self.width), device=index.device)
        return self.weight.new_zeros((1, self.width))


@dataclass(frozen=True, kw_only=True)
class RemoveRows(AppliedAgain, TouchesModule):
    """Takes away the rows of an embedding that positions inside attention are made from.

    Again after loading, as zero rows that stock transformers has loaded could be trained.

    Attributes:
        native: whether zeros of its shape stand for it in the state dict, so that stock classes run it; otherwise they
            refuse it.
    """

    needs_weights: ClassVar[bool] = True
    native: bool

    def apply(self, model: Any, saved: Saved) -> None:
        weight = model.get_submodule(self.path).weight
        zeros = weight.new_zeros(weight.shape if self.native else SENTINEL_SHAPE).detach()
        replace_child(model, self.path, NoRows(zeros, weight.shape[1]), saved)

    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        restore_child(model, self.path, saved)

    def check(self, model: PreTrainedModel) -> str | None:
        module = model.get_submodule(self.path)
        empty = isinstance(module, NoRows) and module.is_empty
        return None if empty else "the rows that native positions are made from are still there"

    def check_loaded(self, model: nn.Module) -> str | None:
        return not_zero(stored(model.get_submodule(self.path), "weight"))


@dataclass(frozen=True, kw_only=True)
class CopyRows(PluginOnly):
    """Begins a scheme's learned table with the rows from which the same mechanism was made natively.

    Attributes:
        source: path of the embedding that holds them.
        carried: path of the scheme's mechanism, whose `table` takes them.
    """

    source: str
    carried: str

    def apply(self, model: Any, saved: Saved) -> None:
        rows, table = model.get_submodule(self.source).weight, model.get_submodule(self.carried).table
        if not rows.is_meta and not table.is_meta:
            table.data.copy_(rows.detach())

    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        """Nothing: the mechanism goes as a whole."""

    def check(self, model: PreTrainedModel) -> str | None:
        """Return None: the rows may have been trained since."""
        return None

    @property
    def touches(self) -> tuple[str, ...]:
        return (f"{self.carried}.",)


@dataclass(frozen=True, kw_only=True)
class LeaveOut(BuiltByConfig, TouchesModule):
    """Leaves a module out of the model that nothing calls any more; its name keeps its place."""

    def apply(self, model: PreTrainedModel, saved: Saved) -> None:
        owner, leaf = owner_of(model, self.path)
        saved["module"] = model.get_submodule(self.path)
        setattr(owner, leaf, None)

    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        """Put the module back, on the device to which the model has moved."""
        if "module" not in saved:
            return
        owner, leaf = owner_of(model, self.path)
        neighbour = next(owner.parameters())
        if holds_values(neighbour):
            saved["module"].to(neighbour.device, neighbour.dtype)
        setattr(owner, leaf, saved["module"])

    def check(self, model: PreTrainedModel) -> str | None:
        owner, leaf = owner_of(model, self.path)
        actual = getattr(owner, leaf, None)
        return None if actual is None else f"a {type(actual).__name__} is there again"


def relative_part(model: nn.Module, stack: Stack) -> RelativePart | None:
    """Return the positions inside the attention of `stack` that are not a scheme, or None."""
    relative = None if stack.spec.traits is None else stack.spec.traits.relative
    return relative if relative is not None and relative.is_in(config_at(model.config, stack.config)) else None


def relative_choice(model: nn.Module, sites: Sites, choice: str | None) -> Any:
    """Return "keep" or "drop" for the relative positions of `model`, or None where it has none.

    Raises:
        UnsupportedSwapError: `choice` is neither "keep" nor "drop", or the model has none.
    """
    if choice not in (None, "keep", "drop"):
        raise UnsupportedSwapError(f"relative must be 'keep' or 'drop', got {choice!r}.")
    if any(relative_part(model, stack) is not None for stack in sites.stacks):
        return choice or "keep"
    if choice is None:
        return None
    raise UnsupportedSwapError(
        f"relative={choice!r} is for models with relative positions inside attention and a position table (DeBERTa, "
        f"DeBERTa-v2); {type(model).__name__} has none. Leave it out."
    )


def plan_relative(context: SwapContext) -> PlanDraft:
    """Plan the relative positions inside attention: they stay, or their modules are removed."""
    relative = None if context.relative is None else relative_part(context.model, context.stack)
    if relative is None:
        return PlanDraft()
    if context.relative == "keep":
        return PlanDraft(notes=['Its relative positions stay with the scheme; relative="drop" removes them.'])
    edits = [_switch_off(context, path, relative.config_name) for path in _paths(context, relative.switches)]
    for path in _paths(context, relative.weights):
        before = type(context.model.get_submodule(path)).__name__
        edits.append(LeaveOut(site="attention", path=path, before=before, after="left out", stack=context.stack.name))
    return PlanDraft(
        edits=edits,
        values={relative.config_name: False},
        unused=_parameters_left_out(context.model, edits),
        adaptation="required: the weights have never been without their relative positions",
    )


def _paths(context: SwapContext, patterns: tuple[str, ...]) -> Iterator[str]:
    root = context.model.get_submodule(context.sites.base)
    return (join(context.sites.base, path) for pattern in patterns for path in matching(root, pattern))


def _parameters_left_out(model: nn.Module, edits: list[Edit]) -> dict[str, int]:
    """Return the parameters, by name, of what `edits` leave out of `model`: their numbers of elements."""
    paths = [edit.path for edit in edits if isinstance(edit, LeaveOut)]
    parameters = ((path, *item) for path in paths for item in model.get_submodule(path).named_parameters())
    return {f"{path}.{name}": parameter.numel() for path, name, parameter in parameters}


@dataclass(frozen=True, kw_only=True)
class AllowAttnImplementation(AppliedAgain, TouchesNothing):
    """Lets `set_attn_implementation` switch a model between eager and sdpa, and refuse other implementations.

    transformers goes by the source of a class, and logs a warning where that has no interface; these attention modules
    have been given one. The masks of such classes are for eager code and sdpa at most.

    Attributes:
        sdpa: whether the masks that the model makes are for sdpa too.
    """

    sdpa: bool

    def apply(self, model: PreTrainedModel, saved: Saved) -> None:
        for module in _models(model):
            let_choose_attention(module, sdpa=self.sdpa)

    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        """Take the choice away; the model's own config says how it attended."""
        for module in _models(model):
            let_class_choose_attention(module)

    def check(self, model: PreTrainedModel) -> str | None:
        return None if can_choose_attention(model) else "its attn_implementation cannot be set any more"


def plan_attn_implementation(contexts: list[SwapContext], draft: PlanDraft) -> PlanDraft:
    """Return the edit after which the attn_implementation of a model can be set; none where its class already can.

    Args:
        contexts: of the stacks, the main one last.
        draft: the plan so far.
    """
    context = contexts[-1]
    model, sites = context.model, context.sites
    given = any(isinstance(edit, AttendThroughInterface) for edit in draft.edits)
    if not given or len(sites.stacks) > 1 or getattr(model.config, "add_cross_attention", False):
        return PlanDraft()  # what attends across has the class that it had
    traits = sites.main.spec.traits
    if can_choose_attention(model) or traits is None:
        return PlanDraft()
    implementations = "only eager" if traits.eager_masks else "eager or sdpa"
    allow = AllowAttnImplementation(
        site="attention",
        path="(model)",
        before="attends as its class does",
        after=f"attn_implementation can be set: {implementations}",
        stack=context.stack.name,
        sdpa=not traits.eager_masks,
    )
    note = (
        f"set_attn_implementation: {implementations}. The stock class ignores it, with a warning; flash and flex are "
        "refused."
    )
    return PlanDraft(edits=[allow], notes=[note])


def _models(model: nn.Module) -> list[Any]:
    """Return `model` and the models in it that read the same config."""
    from transformers import PreTrainedModel

    config: object = model.config
    return [module for module in model.modules() if isinstance(module, PreTrainedModel) and module.config is config]
