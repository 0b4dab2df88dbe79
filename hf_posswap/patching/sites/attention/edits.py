"""The edits of attention modules, and their hooks: they find true positions, or coordinates, and wrap the cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from hf_posswap.compat.peft_wrappers import original_of
from hf_posswap.compat.torch_modules import pre_hooks
from hf_posswap.compat.transformers_attention import let_choose_flash
from hf_posswap.compat.transformers_calls import cache_view, find_cache, is_paged_cache, self_attention_cache
from hf_posswap.errors import PosswapError, UnsupportedSwapError
from hf_posswap.families.base import PositionSource
from hf_posswap.families.locating import causal_by_config
from hf_posswap.families.modules import CarriedModule, by_name, entry_signature, is_removed, owner_of
from hf_posswap.geometry import Geometry
from hf_posswap.patching.edits.continuous_batching import (
    REFUSED,
    asks_where_keys_stand,
    refuse_continuous_batching,
    why_not_paged,
)
from hf_posswap.patching.edits.edit import PluginOnly, Saved, TouchesModule, TouchesNothing
from hf_posswap.patching.edits.restore import bring_all, device_of, keep_hooks, remove_hooks
from hf_posswap.patching.sites.attention.cached_keys import growing_layers, keys_of
from hf_posswap.patching.sites.attention.call import CALL_ARGUMENT, AttentionCall
from hf_posswap.patching.sites.attention.forward_memo import (
    ForwardMemo,
    ForwardMemos,
    Span,
    Standing,
    identity_of,
)
from hf_posswap.patching.sites.attention.function import ConfigView, register_attention
from hf_posswap.patching.sites.attention.positions import (
    SEE_EACH_OTHER,
    check_fits,
    counted,
    find_span,
    looks_packed,
    on_one_axis,
    paged_span,
)
from hf_posswap.schemes.base import Scheme
from hf_posswap.schemes.common.table import places_of
from hf_posswap.schemes.mechanism import Mechanism, building

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import Cache, PreTrainedModel

    from hf_posswap.compat.transformers_calls import PagedArguments

COORDINATES = "posswap_coordinates"
"""Keyword argument by which attention modules are given the coordinates of their tokens."""


class PositionHook:
    """Pre-hook of an attention module: finds positions, wraps the cache, tells the attention function.

    Args:
        owner: the module that carries the mechanism.
        name: under which it does.
        memos: shared by the layers of the model.
        hidden_argument: what the module calls its input, where it is given by name.
        first: what the model's `position_ids` call position 0.
        layer: which of the model's attention layers this is, counted from 0.
    """

    def __init__(
        self, owner: nn.Module, name: str, memos: ForwardMemos, hidden_argument: str, first: int, layer: int
    ) -> None:
        self.carried, self.layer = CarriedModule(owner, name), layer
        self.memos, self.hidden_argument, self.first = memos, hidden_argument, first

    def __setstate__(self, state: Mapping[str, object]) -> None:
        vars(self).update(state)
        register_attention()  # a process that has unpickled a model has patched none

    @property
    def mechanism(self) -> Mechanism:
        """The scheme at work."""
        return self.carried().for_layer(self.layer)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        hidden = args[0] if args else kwargs[self.hidden_argument]
        tokens_first = getattr(type(module), "tokens_first", None)  # a module is asked in vain at some length
        hidden = hidden if tokens_first is None else tokens_first(hidden)
        memo, mechanism = self.memos.now(module), self.mechanism
        standing = memo.standing
        inputs = *identity_of(kwargs.get("position_ids")), hidden.shape, hidden.device, len(args)
        if standing is None or not standing.matches(module, mechanism, kwargs, inputs):
            standing = self._standing(module, mechanism, memo, hidden, args, kwargs, inputs)
        call = AttentionCall(mechanism, standing.span, memo, standing.keys, paged=standing.paged)
        kwargs = {**kwargs, CALL_ARGUMENT: call}
        if standing.keys != "raw" and standing.slot is not None and standing.cache is not None:
            if standing.view is None:
                standing.view = cache_view(standing.cache, call.written)
            if isinstance(standing.slot, str):
                kwargs[standing.slot] = standing.view
            else:
                args = (*args[: standing.slot], standing.view, *args[standing.slot + 1 :])
        return args, kwargs

    def _standing(
        self,
        module: nn.Module,
        mechanism: Mechanism,
        memo: ForwardMemo,
        hidden: Tensor,
        args: tuple[object, ...],
        kwargs: Mapping[str, Any],
        inputs: tuple[object, ...],
    ) -> Standing:
        """Return where the tokens `hidden` [B, Q, E] stand, and how the cache takes their keys."""
        slot_and_cache = cache_of_call(module, args, kwargs)
        slot, cache = (None, None) if slot_and_cache is None else slot_and_cache
        position_ids, first = kwargs.get("position_ids"), self.first
        if position_ids is None:
            position_ids, first = self._unpassed_ids(module, memo), first if memo.given_by_caller else 0
        layer: Any = getattr(module, "layer_idx", None)  # where there is no cache, there may be none
        paged = cache is not None and is_paged_cache(cache)
        if paged and (why := why_not_paged(mechanism, kwargs)) is not None:  # by another way than the model's methods
            raise UnsupportedSwapError(REFUSED.format(model=type(module).__name__, why=why))
        own_cache = None if cache is None or paged else self_attention_cache(cache)
        keys = "rotated" if paged and mechanism.rotates else keys_of(own_cache, layer, mechanism, hidden)
        keeps_keys = mechanism.biases or mechanism.splits or (mechanism.rotates and keys == "raw")
        span = find_span(hidden, position_ids, own_cache, layer, memo, first, keeps_keys=keeps_keys)
        if paged and keeps_keys:
            span = paged_span(span, cache, layer, cast("PagedArguments", kwargs), memo)
        standing = Standing(mechanism, span, keys, slot, cache, paged, inputs)
        if memo.in_forward and own_cache is not None and not torch.jit.is_tracing():
            known = growing_layers(own_cache, layer)
            standing.layers, standing.layer_state = (None, None) if known is None else known
            memo.standing = standing
        return standing

    def check_used(self, module: nn.Module, args: object, kwargs: dict[str, Any], output: Any) -> None:
        """Check after a forward of `module` that it attended through the attention function that it was told of.

        Raises:
            PosswapError: it did not, so that the scheme had no effect.
        """
        call = kwargs.get(CALL_ARGUMENT)
        if (call is None or not call.used) and not torch.compiler.is_compiling():
            raise PosswapError(
                f"{type(module).__name__} attended without the scheme that was put inside it: it does not ask "
                "transformers' AttentionInterface, or does not hand its keyword arguments on, in this release of "
                "transformers. Its outputs would be wrong. Run `posswap selfcheck`, and report it."
            )

    def _unpassed_ids(self, module: nn.Module, memo: ForwardMemo) -> Tensor | None:
        """Return the position ids that the model was given and did not pass on; None: there are none.

        Raises:
            UnsupportedSwapError: `module` runs again in the backward, or will, when they are gone.
        """
        if self.memos.lost() or (memo.runs_again and memo.given is not None):
            raise UnsupportedSwapError(
                f"{type(module).__name__} is not told of position ids, and under gradient checkpointing it runs again "
                "when they are gone. What works: no position ids and padding on the right, or no checkpointing."
            )
        return memo.given


def cache_of_call(
    module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[int | str, Cache] | None:
    """Return the place or name of the cache that `module` is given, and the cache; None: there is none.

    Raises:
        UnsupportedSwapError: it is given something that works like a cache and is none of transformers'.
    """
    try:
        return find_cache(args, kwargs)
    except TypeError as error:
        raise UnsupportedSwapError(f"{type(module).__name__}: {error}") from error


class StartHook:
    """Pre-hook and hook of the module that takes the input: nothing of another forward is ever reused.

    Some models add position ids to their table and do not tell their attention of them, or know of none: it keeps them
    meanwhile. Where none are given, those that the stock class would count stand for them.

    Args:
        owner: the module that carries the mechanism, which has no forward that could bring weights that are offloaded.
        name: under which it does.
        memos: shared by the layers.
        signature: names of the module's positional arguments.
        masks_by_index: whether the stack is causal and its stock class, told of position ids or not, goes by none;
            None: it takes ids, and the first packed documents show whether it masks by them.
        sides: the values of `is_causal` that suit the scheme; empty: any.
    """

    sides: tuple[bool | None, ...] = ()

    def __init__(
        self,
        owner: nn.Module,
        name: str,
        memos: ForwardMemos,
        signature: list[str],
        *,
        masks_by_index: bool | None,
        sides: tuple[bool | None, ...],
    ) -> None:
        self.carried, self.sides = CarriedModule(owner, name), sides
        self.memos, self.signature, self.masks_by_index = memos, signature, masks_by_index
        self.carriers: list[str] = []
        """Paths of the attention modules that were given the scheme, in the module that takes the input."""

    def __call__(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[Any, Any] | None:
        if not torch.compiler.is_compiling():
            bring_all(self.carried())
        given = by_name(self.signature, args, kwargs)
        sides = given.get("is_causal", causal_by_config(getattr(module, "config", None)))
        # continuous batching says False where it brings a mask, which is causal
        if self.sides and sides not in self.sides and not any(map(is_paged_cache, given.values())):
            raise UnsupportedSwapError(
                f"{type(module).__name__} was called with is_causal={sides}, of the call or of its config, and the "
                f"scheme in it was made for is_causal={not sides}: its positions would be wrong. What works: leave "
                "is_causal as it was, and use_bidirectional_attention where the config has it; or set "
                f"config.is_causal = {sides} in the base model, and then call patch_model with a scheme for what a "
                "token then sees."
            )
        position_ids, source = given.get("position_ids"), self.memos.traced.source
        takes, by_caller = "position_ids" in self.signature, position_ids is not None
        if position_ids is None:
            slot_and_cache = cache_of_call(module, args, kwargs)
            position_ids = counted(
                source, self.memos.traced.padding_id, given, None if slot_and_cache is None else slot_and_cache[1]
            )
        else:  # the model's code does not check, and would let all tokens share a single one
            check_fits(position_ids, given, heard=takes)
        may_be_packed = by_caller and self.masks_by_index is not False
        if by_caller and position_ids is not None and position_ids.dim() == 3:
            may_be_packed = may_be_packed and len(position_ids) == 4
            position_ids = on_one_axis(position_ids, turns=self.carried().turns, name=type(module).__name__)
        packed = may_be_packed and position_ids is not None and looks_packed(position_ids, given)
        if packed and self.masks_by_index:
            raise UnsupportedSwapError(SEE_EACH_OTHER.format(name=type(module).__name__))
        tells = position_ids is not None and takes and not by_caller and source == "mask"
        checkpoints = (getattr(child, "gradient_checkpointing", False) for child in module.modules())
        again = module.training and torch.is_grad_enabled() and any(checkpoints)
        self.memos.begin(module, None if tells else position_ids, by_caller=by_caller, runs_again=again)
        if packed:
            self.memos.of_thread().packed_for = type(module).__name__
        if not tells:
            return None
        return (), {**given, "position_ids": position_ids}  # it passes its ids on to its attention

    def stop(self, module: nn.Module, *_: object) -> None:
        """End a forward of `module`.

        Raises:
            PosswapError: attention modules that were given the scheme were replaced. Layers may have been removed.
        """
        calls = None if torch.compiler.is_compiling() or self.memos.begun_traced else self.memos.of_thread().calls
        self.memos.end(module)
        if calls is not None and calls < len(self.carriers):  # layers may be left out, or compiled by themselves
            self._check_carriers(module)

    def _check_carriers(self, module: nn.Module) -> None:
        carriers = tuple(self.carriers)  # first: another thread may be adding more
        hooks = (hook for child in module.modules() for hook in pre_hooks(child) if isinstance(hook, PositionHook))
        present = sum(hook.memos is self.memos for hook in hooks)
        removed = sum(is_removed(module, path) for path in carriers)
        count = len(carriers)
        if present + removed < count:
            raise PosswapError(
                f"{count - present - removed} of {count} attention modules of {type(module).__name__} that were "
                "swapped have been replaced since (set_attention_type does that, for example): the model would "
                "compute without positions, or with the native ones. What works: load the model again, replace the "
                "modules, and then call hf_posswap.patch_model."
            )


@dataclass(frozen=True, kw_only=True)
class AddMechanism(PluginOnly, TouchesModule):
    """Registers the scheme's module at `path`, and hooks that keep forwards apart.

    Attributes:
        entry: path of the module that takes the stack's input.
        scheme: resolved.
        geometry: of the stack.
        native_bias: whether the stock class has a bias on its scores, which goes by the index of tokens.
        drops_bias: whether what is left of the bias that the model itself makes is zeros.
        position_source: what the stock class counts where it is given no position ids.
        padding_id: the token id that is not counted, where it counts input ids.
    """

    entry: str
    scheme: Scheme
    geometry: Geometry
    native_bias: bool
    drops_bias: bool
    position_source: PositionSource
    padding_id: int | None

    def apply(self, model: PreTrainedModel, saved: Saved) -> None:
        with building():
            mechanism = self.scheme.mechanism(self.geometry)
        mechanism.to(device_of(model))
        owner, leaf = owner_of(model, self.path)
        saved["added"] = True
        model.set_submodule(self.path, mechanism)
        if (why := why_not_paged(mechanism)) is not None:
            refuse_continuous_batching(model, why)
        saved["flash"] = asks_where_keys_stand(mechanism) and let_choose_flash(model, False)
        entry = model.get_submodule(self.entry)
        memos = ForwardMemos(drops_bias=self.drops_bias, source=self.position_source, padding_id=self.padding_id)
        signature = entry_signature(entry)
        goes_by_ids = "position_ids" in signature and not self.native_bias
        masks_by_index = None if self.geometry.causal and goes_by_ids else self.geometry.causal
        at_swap = causal_by_config(getattr(entry, "config", model.config))
        sides = (None, at_swap, self.geometry.causal) if self._follows_causality(mechanism) else ()
        start = StartHook(owner, leaf, memos, signature, masks_by_index=masks_by_index, sides=sides)
        keep_hooks(saved, entry.register_forward_pre_hook(start, with_kwargs=True))
        keep_hooks(saved, entry.register_forward_hook(start.stop, always_call=True))

    def _follows_causality(self, mechanism: Mechanism) -> bool:
        """Return whether the scheme would be another, or none, if tokens saw the other side too, or only one."""
        if self.scheme.traits.causal_only and self.geometry.causal:
            return True
        try:
            with building():
                other = self.scheme.mechanism(replace(self.geometry, causal=not self.geometry.causal))
        except Exception:  # arbitrary code of a scheme
            return True
        here, there = _constants(mechanism), _constants(other)
        plain, other_plain = (
            [
                value
                for module in one.modules()
                for value in vars(module).values()
                if isinstance(value, bool | int | float)
            ]
            for one in (mechanism, other)
        )
        differ = any(name not in there or not torch.equal(here[name].cpu(), there[name].cpu()) for name in here)
        return differ or plain != other_plain

    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        remove_hooks(saved)
        owner, leaf = owner_of(model, self.path)
        if saved.pop("added", False) and hasattr(owner, leaf):
            delattr(owner, leaf)
        refuse_continuous_batching(model, None)
        if saved.pop("flash", False):
            let_choose_flash(model, True)

    def check(self, model: PreTrainedModel) -> str | None:
        carried = model.get_submodule(self.path)
        mechanism = original_of(carried)
        with building():
            fresh = self.scheme.mechanism(self.geometry)
        if type(mechanism) is not type(fresh):
            return f"a {type(mechanism).__name__} is in the place of a {type(fresh).__name__}"
        actual, expected = _constants(mechanism), _constants(fresh)
        wrong = [n for n in expected if n not in actual or not torch.equal(actual[n].cpu(), expected[n].cpu())]
        if wrong:
            return f"{', '.join(wrong)} of the mechanism changed"
        start = start_hook(model, self.entry)
        if start is None:
            return "the hook that separates forwards is missing"
        sides = causal_by_config(getattr(model.get_submodule(self.entry), "config", model.config))
        changed = bool(start.sides) and sides not in start.sides
        sees = "only its past" if sides else "both sides"
        return f"the config was changed after the swap so that a token sees {sees}" if changed else None

    def with_scheme(self, scheme: Scheme) -> Self:
        return replace(self, scheme=scheme)


@dataclass(frozen=True, kw_only=True)
class PatchAttention(PluginOnly, TouchesNothing):
    """Puts the scheme between one attention module's projections and its attention implementation.

    Attributes:
        carried: path of the mechanism, which is there already.
        entry: path of the module that takes the stack's input.
        first: what the model's `position_ids` call position 0.
        layer: which of the model's attention layers it is, counted from 0.
    """

    hook: ClassVar[type[PositionHook]] = PositionHook
    carried: str
    entry: str
    first: int
    layer: int

    def apply(self, model: Any, saved: Saved) -> None:
        module, start = model.get_submodule(self.path), start_hook(model, self.entry)
        assert start is not None
        module.config = ConfigView(module.config)
        owner, leaf = owner_of(model, self.carried)
        hook = self.hook(owner, leaf, start.memos, entry_signature(module)[0], self.first, self.layer)
        keep_hooks(saved, module.register_forward_pre_hook(hook, with_kwargs=True))
        keep_hooks(saved, module.register_forward_hook(hook.check_used, with_kwargs=True))
        start.carriers.append(self.path.removeprefix(f"{self.entry}.") if self.entry else self.path)

    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        """Give the attention module the model's config again, whatever that is by now."""
        remove_hooks(saved)
        module = model.get_submodule(self.path)
        if isinstance(module.config, ConfigView):
            module.config = module.config.native

    def check(self, model: PreTrainedModel) -> str | None:
        module = model.get_submodule(self.path)
        hooked = any(isinstance(hook, PositionHook) for hook in pre_hooks(module))
        good = hooked and isinstance(module.config, ConfigView)
        return None if good else "the attention module does not carry the scheme"


def start_hook(model: nn.Module, entry: str) -> StartHook | None:
    """Return the hook by which `AddMechanism` keeps the forwards of the stack that begins at `entry` apart, or None."""
    hooks = pre_hooks(model.get_submodule(entry))
    return next((hook for hook in hooks if isinstance(hook, StartHook)), None)


def _constants(mechanism: Mechanism) -> dict[str, Tensor]:
    """Return the constant tensors of a mechanism: angles, slopes."""
    constants: dict[str, Tensor] = {}
    for path, module in mechanism.named_modules():
        for name, value in vars(module).items():
            if value is getattr(module, "number", None):
                continue  # each copy has its own
            values = value if isinstance(value, tuple) else (value,)
            tensors = {f"{path}.{name}[{i}]": tensor for i, tensor in enumerate(values) if isinstance(tensor, Tensor)}
            constants |= {name.lstrip("."): tensor for name, tensor in tensors.items()}
    return constants


class CoordinatesHook:
    """Pre-hook of the module that takes the image: its attention modules are given the tokens' coordinates.

    Args:
        geometry: of the model.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        pixels = args[0] if args else kwargs["pixel_values"]
        grid = self.geometry.grid((pixels.shape[-2], pixels.shape[-1]))
        places = places_of(grid, self.geometry.prefix_tokens, pixels.device)
        return args, {**kwargs, COORDINATES: places}


@dataclass(frozen=True, kw_only=True)
class PassCoordinates(PluginOnly, TouchesNothing):
    """Makes a module that takes images pass the coordinates of the tokens on to its attention modules.

    Attributes:
        entry: path of the module.
        geometry: of the stack.
    """

    entry: str
    geometry: Geometry

    def apply(self, model: PreTrainedModel, saved: Saved) -> None:
        module = model.get_submodule(self.entry)
        keep_hooks(saved, module.register_forward_pre_hook(CoordinatesHook(self.geometry), with_kwargs=True))

    def undo(self, model: PreTrainedModel, saved: Saved) -> None:
        remove_hooks(saved)

    def check(self, model: PreTrainedModel) -> str | None:
        hooks = pre_hooks(model.get_submodule(self.entry))
        passed = any(isinstance(hook, CoordinatesHook) for hook in hooks)
        return None if passed else "coordinates are not passed on to attention"


class CoordinateHook(PositionHook):
    """Pre-hook of an attention module that is given coordinates: tells the attention function."""

    def __call__(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        memo = self.memos.now(module)
        places: Tensor = kwargs[COORDINATES]
        span = memo.shared(identity_of(places), lambda shared: Span(places, places.shape[1], True, None, shared))
        call = AttentionCall(self.mechanism, span, memo, keys="raw")
        return args, {**{k: v for k, v in kwargs.items() if k != COORDINATES}, CALL_ARGUMENT: call}


@dataclass(frozen=True, kw_only=True)
class PatchImageAttention(PatchAttention):
    """Puts a scheme of coordinates between an attention module's projections and its attention implementation."""

    hook = CoordinateHook
