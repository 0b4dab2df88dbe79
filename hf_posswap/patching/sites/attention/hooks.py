"""The hooks of a patched model: they find true positions, wrap the cache, and tell the attention function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.patching.edits.offload import bring_all
from hf_posswap.patching.sites.attention.cache_view import rotating, self_attention_cache, takes_several_keys
from hf_posswap.patching.sites.attention.call import CALL_ARGUMENT, AttentionCall
from hf_posswap.patching.sites.attention.continuous_batching import Refusal, needs_key_positions
from hf_posswap.patching.sites.attention.position_sources import check_fits, counted
from hf_posswap.patching.sites.attention.positions import ForwardMemo, find_span
from hf_posswap.schemes.base import Mechanism


class PositionHook:
    """Pre-hook of an attention module: finds positions, wraps the cache, tells the attention function.

    Args:
        owner: the module that carries the mechanism.
        name: under which it does.
        memo: shared by the layers of the model.
        cache_argument: what the module calls its cache; None: it takes none.
        first: what the model's `position_ids` call position 0.
        layer: which of the model's attention layers this is, counted from 0.
    """

    def __init__(
        self, owner: nn.Module, name: str, memo: ForwardMemo, cache_argument: str | None, first: int, layer: int
    ) -> None:
        self.owner, self.name, self.layer = owner, name, layer
        self.memo, self.cache_argument, self.first = memo, cache_argument, first

    @property
    def mechanism(self) -> Mechanism:
        """The scheme at work: looked up in each call, as PEFT's `modules_to_save` puts a trained copy in its place."""
        return getattr(self.owner, self.name).for_layer(self.layer)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        hidden = args[0] if args else kwargs["hidden_states"]
        tokens_first: Any = getattr(type(module), "tokens_first", None)  # a module is asked in vain at some length
        hidden = hidden if tokens_first is None else tokens_first(hidden)
        cache: Any = None if self.cache_argument is None else kwargs.get(self.cache_argument)
        position_ids, first = kwargs.get("position_ids"), self.first
        if position_ids is None and self.memo.given is not None:
            position_ids, first = self._unpassed_ids(module), self.first if self.memo.given_by_caller else 0
        layer: Any = getattr(module, "layer_idx", None)  # where there is no cache, there may be none
        mechanism, own = self.mechanism, self_attention_cache(cache)
        several = mechanism.keys_per_token > 1 and takes_several_keys(own, layer, mechanism.head_dim)
        writes_rotated = cache is not None and mechanism.stores_rotated_keys and (mechanism.rotates or several)
        keeps_keys = mechanism.biases or mechanism.splits or (mechanism.rotates and not writes_rotated)
        if keeps_keys and hasattr(kwargs.get("cache"), "layer_to_allocator") and needs_key_positions(mechanism):
            Refusal(type(module).__name__)()  # a paged cache, by another way than the model's own methods
        span = find_span(hidden, position_ids, own, layer, self.memo, first, keeps_keys=keeps_keys)
        call = AttentionCall(mechanism, span, self.memo, keys_rotated=writes_rotated)
        kwargs = {**kwargs, CALL_ARGUMENT: call}
        if writes_rotated and self.cache_argument is not None:
            kwargs[self.cache_argument] = rotating(cache, lambda k: mechanism.rotate_key(k, call.rotation()))
        return args, kwargs

    def _unpassed_ids(self, module: nn.Module) -> Tensor | None:
        if self.memo.runs_again and torch.is_grad_enabled():
            raise UnsupportedSwapError(
                f"{type(module).__name__} is not told of position ids, and under gradient checkpointing it runs again "
                "when they are gone. What works: no position ids and padding on the right, or no checkpointing."
            )
        return self.memo.given


class StartHook:
    """Pre-hook and hook of the module that takes the input: nothing of another forward is ever reused.

    Some models add position ids to their table and do not tell their attention of them, or know of none: it keeps them
    meanwhile. Where none are given, those that the stock class would count stand for them.

    Args:
        owner: the module that carries the mechanism, which has no forward that could bring weights that are offloaded.
        name: under which it does.
        memo: shared by the layers.
        signature: names of the module's positional arguments.
    """

    def __init__(self, owner: nn.Module, name: str, memo: ForwardMemo, signature: list[str]) -> None:
        self.owner, self.name = owner, name
        self.memo, self.signature = memo, signature

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        self.stop()
        if not torch.compiler.is_compiling():
            self.memo.in_forward = True
            bring_all(getattr(self.owner, self.name))
        memo, given = self.memo, dict(zip(self.signature, args, strict=False)) | kwargs
        checkpoints = (getattr(part, "gradient_checkpointing", False) for part in module.modules())
        memo.runs_again = module.training and any(checkpoints)
        memo.given = given.get("position_ids")
        memo.given_by_caller = memo.given is not None
        takes = "position_ids" in self.signature
        if memo.given is not None:
            if not takes:
                check_fits(memo.given, given)  # no code of the model's own does
            return None
        memo.given = counted(memo.source, memo.padding_id, given)
        if memo.given is None or not takes or memo.source != "mask":
            return None
        position_ids, memo.given = memo.given, None  # it tells its attention what it is given
        return (), {**dict(zip(self.signature, args, strict=False)), **kwargs, "position_ids": position_ids}

    def stop(self, *_: Any) -> None:
        """End a forward."""
        self.memo.given = None
        if not torch.compiler.is_compiling():
            self.memo.in_forward = False
            self.memo.clear()
