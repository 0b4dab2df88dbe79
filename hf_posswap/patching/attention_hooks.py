"""The hooks of a patched model: they find true positions, wrap the cache, and tell the attention function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.patching.attention_call import CALL_ARGUMENT, AttentionCall
from hf_posswap.patching.cache_view import rotating, self_attention_cache, takes_copies
from hf_posswap.patching.offloaded import bring_all
from hf_posswap.patching.positions import ForwardMemo, after_padding, check_fits, find_span
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
        tokens_first: Any = getattr(module, "tokens_first", None)
        hidden = hidden if tokens_first is None else tokens_first(hidden)
        cache: Any = None if self.cache_argument is None else kwargs.get(self.cache_argument)
        position_ids, first = kwargs.get("position_ids"), self.first
        if position_ids is None and self.memo.given is not None:
            position_ids, first = self._untold(module), self.first if self.memo.told else 0
        layer: Any = getattr(module, "layer_idx", None)  # where there is no cache, there may be none
        span = find_span(hidden, position_ids, self_attention_cache(cache), layer, self.memo, first)
        mechanism = self.mechanism
        copies = mechanism.copies > 1 and takes_copies(self_attention_cache(cache), layer, mechanism.head_dim)
        writes_rotated = cache is not None and mechanism.stores_rotated_keys and (mechanism.rotates or copies)
        call = AttentionCall(mechanism, span, self.memo, keys_rotated=writes_rotated)
        kwargs = {**kwargs, CALL_ARGUMENT: call}
        if writes_rotated and self.cache_argument is not None:
            kwargs[self.cache_argument] = rotating(cache, lambda k: mechanism.rotate_key(k, call.rotation()))
        return args, kwargs

    def _untold(self, module: nn.Module) -> Tensor | None:
        if self.memo.runs_again and torch.is_grad_enabled():
            raise UnsupportedSwapError(
                f"{type(module).__name__} is not told of position ids, and under gradient checkpointing it runs again "
                "when they are gone. What works: no position ids and padding on the right, or no checkpointing."
            )
        return self.memo.given


class StartHook:
    """Pre-hook and hook of the module that takes the input: nothing of another forward is ever reused.

    Some models add position ids to their table and do not tell their attention of them, or know of none: it keeps them
    meanwhile. Where none are given to those, positions that skip left padding stand for them.

    Args:
        owner: the module that carries the mechanism, which has no forward that could bring weights that are offloaded.
        name: under which it does.
        memo: shared by the layers.
        signature: names of the module's positional arguments.
    """

    def __init__(self, owner: nn.Module, name: str, memo: ForwardMemo, signature: list[str]) -> None:
        self.owner, self.name = owner, name
        self.memo, self.signature = memo, signature

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stop()
        if not torch.compiler.is_compiling():
            bring_all(getattr(self.owner, self.name))
        given = dict(zip(self.signature, args, strict=False)) | kwargs
        checkpoints = (getattr(part, "gradient_checkpointing", False) for part in module.modules())
        self.memo.runs_again = module.training and any(checkpoints)
        self.memo.given = given.get("position_ids")
        self.memo.told = self.memo.given is not None
        if "position_ids" in self.signature:
            return
        if self.memo.given is not None:
            check_fits(self.memo.given, given)  # no code of the model's own does
        else:
            self.memo.given = after_padding(given, only_if_padded=self.memo.runs_again)

    def stop(self, *_: Any) -> None:
        """End a forward."""
        self.memo.given = None
        if not torch.compiler.is_compiling():
            self.memo.clear()
