"""The attention site: a scheme between a model's projections and its own attention implementation.

No forward is copied. A patched attention module gets a view of its config that names `posswap_attention`; a pre-hook
finds the true positions and, where a scheme allows, lets the cache store rotated keys; the function applies the
scheme and delegates to the implementation that the model's own config names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posswap.errors import PosswapError, UnsupportedSwapError
from hf_posswap.families.modules import modeling_module
from hf_posswap.patching import backends
from hf_posswap.patching.cache_view import rotating, self_attention_cache, takes_copies
from hf_posswap.patching.config_view import ATTENTION_NAME, ConfigView
from hf_posswap.patching.offloaded import bring_all
from hf_posswap.patching.pieces import attend_in_pieces
from hf_posswap.patching.positions import ForwardMemo, Span, after_padding, check_fits, find_span
from hf_posswap.schemes.base import Mechanism
from hf_posswap.schemes.piece import Piece

CALL_ARGUMENT = "posswap"


@dataclass
class AttentionCall:
    """What the pre-hook tells the attention function about this call."""

    mechanism: Mechanism
    span: Span
    memo: ForwardMemo
    keys_rotated: bool

    def rotation(self) -> Any:
        """Return what rotates the new tokens, made once for all layers of a forward."""
        return self._shared("rotation", lambda: self.mechanism.prepare(self.span.query, self.span.length))

    def rotate(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return `query` [B, H, Q, D] and `key` [B, G, K, D] with the scheme's rotation.

        Raises:
            PosswapError: there are not as many keys as the cache announced, so their positions are unknown.
        """
        if key.shape[2] != self.span.key_length:
            raise PosswapError(
                f"attention got {key.shape[2]} keys where the cache announced {self.span.key_length}: this kind of "
                "cache is not understood, and positions would be wrong. Use use_cache=False, or a DynamicCache."
            )
        if not self.mechanism.rotates and not self.mechanism.splits:
            return query, key
        if query.shape[-1] != self.mechanism.head_dim:
            raise PosswapError(
                f"attention got queries of {query.shape[-1]} dimensions a head where the config says "
                f"{self.mechanism.head_dim}: which of them to rotate is unknown, so this scheme cannot be used here."
            )
        if not self.mechanism.rotates:
            return query, key
        if not self.keys_rotated:
            table = self.rotation()
            if not self.span.fresh:
                table = self._shared("keys", lambda: self.mechanism.prepare(self.span.key, self.span.length))
            key = self.mechanism.rotate_key(key, table)
        return self.mechanism.rotate_query(query, self.rotation()), key

    def scaled(self, query: Tensor) -> Tensor:
        """Return `query` [B, H, Q, D] times the scheme's factor of each position."""
        if not self.mechanism.scales:
            return query
        factor = self._shared("scale", lambda: self.mechanism.scale(self.span.query))  # [B or 1, Q]
        return (query * factor[:, None, :, None]).to(query.dtype)

    def request(
        self,
        module: Any,
        name: str | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        kwargs: dict[str, Any],
    ) -> backends.Request:
        """Return what a backend is chosen by, under the implementation called `name`."""
        return backends.Request(
            mechanism=self.mechanism,
            span=self.span,
            query=query,
            key=key,
            value=value,
            mask=mask,
            causal=is_causal(module, kwargs),
            implementation=name,
            arguments=kwargs,
            read=lambda: self.flex_bias(len(query)),
            consecutive=lambda: self._shared("consecutive", lambda: backends.consecutive(self.span.query)),
        )

    def pieces(self) -> tuple[Piece, ...]:
        """Return the pieces into which the scheme splits this attention."""
        copied = self._pieces == "copied"
        return self._shared(self._pieces, lambda: self.mechanism.pieces(self.span.query, self.span.key, copied=copied))

    @property
    def _pieces(self) -> str:
        """What the pieces of this call are known by: layers may differ in what their caches hold."""
        return "copied" if self.keys_rotated and self.mechanism.copies > 1 else "pieces"

    def held(self) -> dict[int, Any]:
        """Return where the layers of a forward keep which keys the pieces hold."""
        return self._shared(f"{self._pieces} held", dict)

    def bias(self) -> Tensor | None:
        """Return the scheme's bias, [B or 1, H, Q, K] float32, or None."""
        if not self.mechanism.biases:
            return None
        return self._shared("bias", lambda: self.mechanism.bias(self.span.query, self.span.key))

    def flex_bias(self, batch: int) -> Any:
        """Return the scheme's bias as flex_attention may read it from positions, or None."""
        if backends.is_learned(self.mechanism):  # a checkpointed layer must be able to make it again
            return backends.flex_bias(self.mechanism, self.span, batch)
        return self._shared("flex bias", lambda: backends.flex_bias(self.mechanism, self.span, batch))

    def _shared(self, what: str, make: Callable[[], Any]) -> Any:
        if self.span.made is None:
            return make()
        key = (what, id(self.mechanism))
        value = self.span.made.get(key)
        if value is None:
            value = make()
            # what has a gradient is made in each layer: a checkpointed layer must be able to make it again
            if not (isinstance(value, Tensor) and value.requires_grad):
                self.span.made[key] = value
        return value


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


def posswap_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Apply the scheme of `module` to q [B, H, Q, D] and k [B, G, K, D], then attend as the model's config says.

    Raises:
        PosswapError: called for a module that was not patched.
        UnsupportedSwapError: the scheme adds a bias and the implementation has no place for one.
    """
    call = kwargs.pop(CALL_ARGUMENT, None)
    if call is None:
        raise PosswapError(
            f"{type(module).__name__} reached the {ATTENTION_NAME!r} attention function without a scheme. Do not set "
            f"attn_implementation={ATTENTION_NAME!r}: use hf_posswap.patch_model, and 'sdpa' or 'eager' here."
        )
    native = module.config.native if isinstance(module.config, ConfigView) else module.config
    name = native._attn_implementation
    if call.memo.drops_bias:
        kwargs.pop("position_bias", None)
    query, key = call.rotate(query, key)
    query = call.scaled(query)
    if backends.backends_of(call.mechanism):
        found = backends.attend(call.request(module, name, query, key, value, attention_mask, kwargs), call.pieces)
        if found is not None:
            return found, None
    if call.mechanism.splits:
        return _in_pieces(call, module, name, query, key, value, attention_mask, kwargs)
    as_tensor = name != "flex_attention" or backends.is_learned(call.mechanism)
    if not as_tensor and (read := call.flex_bias(len(query))) is not None:
        kwargs = {**kwargs, "position_bias": read}
    elif (bias := call.bias()) is not None:
        attention_mask, kwargs = _with_bias(bias, attention_mask, kwargs, name, module, query, key)
    attend, target = implementation(module, native, name)
    return attend(target, query, key, value, attention_mask, **kwargs)


def _in_pieces(
    call: AttentionCall,
    module: Any,
    name: str | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Attend in the pieces of a scheme, as the implementation called `name` would."""
    if name not in (None, "eager", "sdpa"):
        raise UnsupportedSwapError(
            f"a scheme of several pieces cannot run under attn_implementation={name!r}: it takes the scores over. "
            "Use model.set_attn_implementation('sdpa') or 'eager'."
        )
    altered = sorted(name for name in ("softcap", "s_aux") if kwargs.get(name) is not None)
    if altered:
        raise UnsupportedSwapError(
            f"{type(module).__name__} alters its attention scores ({', '.join(altered)}), which a scheme of several "
            "pieces does not do. What works: rope, alibi, nope."
        )
    return attend_in_pieces(
        query,
        key,
        value,
        call.pieces(),
        call.span.query,
        call.span.key,
        mask,
        causal=is_causal(module, kwargs),
        scaling=kwargs.get("scaling"),
        dropout=kwargs.get("dropout", 0.0),
        weights=name != "sdpa",
        held=call.held(),
    )


def is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Return whether a mask that is left out in this call means causal."""
    causal = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True)) if causal is None else causal


def implementation(module: nn.Module, config: Any, name: str | None) -> tuple[Callable[..., Any], Any]:
    """Return the attention function called `name` for `module`, whose model has `config`, and what to call it with."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    code = modeling_module(module)
    if name == "eager" and getattr(module, "reorder_and_upcast_attn", False):  # GPT-2's own float32 attention
        return _upcast_eager, module
    eager = getattr(module, "eager_attention", None) or getattr(code, "eager_attention_forward", None)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)  # type: ignore[arg-type]
    if name is not None and ("flash" in name or name.startswith("paged")):
        return attend, _WithConfig(module, config)  # these read the implementation's name from module.config
    return attend, module


def has_interface(module: nn.Module) -> bool:
    """Return whether the class of `module` attends through transformers' AttentionInterface and passes kwargs on."""
    code = modeling_module(module)
    passes = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(type(module).forward).parameters.values())
    interface = hasattr(code, "ALL_ATTENTION_FUNCTIONS") and hasattr(code, "eager_attention_forward")
    cached = hasattr(module, "layer_idx") and cache_argument(module) is not None
    known = hasattr(module, "config") and (cached or getattr(module, "is_causal", True) is False)
    return passes and interface and known


def cache_argument(module: nn.Module) -> str | None:
    """Return what the forward of `module` calls its cache: "past_key_values", or "layer_past" in older code."""
    parameters = inspect.signature(type(module).forward).parameters
    return next((name for name in ("past_key_values", "layer_past") if name in parameters), None)


class _WithConfig:
    """A module, except that its config is the model's own."""

    def __init__(self, module: nn.Module, config: Any) -> None:
        self._module, self.config = module, config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _upcast_eager(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: Any
) -> tuple[Tensor, Tensor]:
    return module._upcast_and_reordered_attn(query, key, value, mask)


def _with_bias(
    bias: Tensor, mask: Any, kwargs: dict[str, Any], name: str | None, module: nn.Module, query: Tensor, key: Tensor
) -> tuple[Any, dict[str, Any]]:
    """Return the mask and kwargs that carry `bias` [B or 1, H, Q, K] into the implementation called `name`."""
    if name == "flex_attention":
        return mask, {**kwargs, "position_bias": bias.to(query.dtype).expand(query.shape[0], -1, -1, -1)}
    if name not in (None, "eager", "sdpa"):
        raise UnsupportedSwapError(
            f"a bias scheme cannot run under attn_implementation={name!r}: it has no place for a bias. "
            "Use model.set_attn_implementation('sdpa'), 'eager' or 'flex_attention'."
        )
    return additive_mask(bias, mask, causal=is_causal(module, kwargs), query=query, key=key), kwargs


def additive_mask(bias: Tensor, mask: Tensor | None, *, causal: bool, query: Tensor, key: Tensor) -> Tensor:
    """Return `bias` with everything masked that `mask`, or causality where it is None, masks.

    Args:
        bias: [B or 1, H, Q, K], float32.
        mask: boolean (True: attend) or additive, [B, 1, Q, K]; None as transformers leaves it out: full attention, or
            causal from the first key where Q > 1.
        causal: whether a left-out mask means causal.
        query: [B, H, Q, D].
        key: [B, G, K, D].
    """
    lowest = torch.finfo(query.dtype).min
    bias = bias.to(torch.promote_types(bias.dtype, query.dtype))  # float32 does not hold float64's lowest
    rows, columns = query.shape[2], key.shape[2]
    if mask is None:
        if causal and rows > 1:
            seen = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()
            bias = bias.masked_fill(~seen, lowest)
        return bias.to(query.dtype)
    mask = mask[..., :columns]
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, lowest).to(query.dtype)
    return (bias + mask).clamp(min=lowest).to(query.dtype)


def register_attention() -> None:
    """Make `posswap_attention` known to transformers, with the mask that sdpa takes."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION_NAME, posswap_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
