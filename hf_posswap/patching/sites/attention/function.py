"""The attention site: a scheme between a model's projections and its own attention implementation.

No forward is copied. A patched attention module gets a view of its config that names `posswap_attention`; a pre-hook
finds the true positions and, where a scheme allows, lets the cache store rotated keys; the function applies the
scheme and delegates to the implementation that the model's own config names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hf_posswap.compat.kvpress_masks import has_masked_keys
from hf_posswap.compat.transformers_attention import (
    attends_by_interface,
    attention_function,
    attention_implementation,
    eager_function,
    register_attention_function,
    upcast_attention,
)
from hf_posswap.compat.transformers_cache import prepare_views
from hf_posswap.compat.transformers_calls import cache_names, forward_parameters
from hf_posswap.errors import PosswapError, UnsupportedSwapError
from hf_posswap.patching.sites.attention import backends, in_graph, key_positions
from hf_posswap.patching.sites.attention.additive_mask import additive_mask
from hf_posswap.patching.sites.attention.call import CALL_ARGUMENT, AttentionCall, is_causal
from hf_posswap.patching.sites.attention.config_view import ATTENTION_NAME, ConfigView
from hf_posswap.patching.sites.attention.split_attention import attend_split
from hf_posswap.utils.devices import as_attended


def posswap_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Apply the scheme of `module` to q [B, H, Q, D] and k [B, G, K, D], then attend as the model's config says.

    Raises:
        PosswapError: called for a module that was not patched.
        UnsupportedSwapError: the scheme adds a bias and the implementation has no place for one; or kvpress hides keys
            from single heads, and this attention would not.
    """
    if dropout is not None:  # kvpress, which wraps every registered function, passes it by position
        kwargs["dropout"] = dropout
    call = kwargs.pop(CALL_ARGUMENT, None)
    if call is None:
        raise _without_scheme(module)
    call.used = True
    native = module.config.native if isinstance(module.config, ConfigView) else module.config
    name = attention_implementation(native)
    if call.memo.drops_bias:
        kwargs.pop("position_bias", None)
    query, key = call.rotate(query, key)
    query = call.scaled(query)
    if call.mechanism.biases and name == "sdpa":  # sdpa takes masks of the dtype that autocast gives the rest
        query, key, value = map(as_attended, (query, key, value))
    _watch(call, query, key, attention_mask, kwargs)
    masks_by_head = _masks_by_head(call, module, name, query, key)
    # for one query all backends are the same
    if query.shape[2] > 1 and not masks_by_head and backends.backends_of(call.mechanism):
        attended = in_graph.attend(call, call.request(module, name, query, key, value, attention_mask, kwargs))
        if attended is not None:
            return attended, None
    if call.mechanism.splits:
        return _split(call, module, name, query, key, value, attention_mask, kwargs)
    as_tensor = name != "flex_attention" or backends.is_learned(call.mechanism)
    if not as_tensor and (read := call.flex_bias(len(query))) is not None:
        kwargs = {**kwargs, "position_bias": read}
    elif call.mechanism.biases:
        attention_mask, kwargs = _with_bias(call, attention_mask, kwargs, name, module, query, key)
    attend, target = implementation(module, native, name)
    return attend(target, query, key, value, attention_mask, **kwargs)


def _watch(call: AttentionCall, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any]) -> None:
    """Show queries and keys to a mechanism that records them."""
    if call.mechanism.watches:
        call.mechanism.watch(query, key, kwargs.get("scaling"), mask, kwargs.get("sliding_window"))


def _without_scheme(module: Any) -> PosswapError:
    return PosswapError(
        f"{type(module).__name__} reached the {ATTENTION_NAME!r} attention function without a scheme. Do not set "
        f"attn_implementation={ATTENTION_NAME!r}: use hf_posswap.patch_model, and 'sdpa' or 'eager' here."
    )


def _masks_by_head(call: AttentionCall, module: Any, name: str | None, query: Tensor, key: Tensor) -> bool:
    """Return whether kvpress hides keys from single heads in this call.

    Raises:
        UnsupportedSwapError: it does, and the attention called `name` would not hide them.
    """
    if not has_masked_keys(module, query.shape[2], key.shape[2]):
        return False
    if call.mechanism.splits or name in (None, "eager"):
        attention = "a scheme with split scores" if call.mechanism.splits else "eager attention"
        raise UnsupportedSwapError(
            f"kvpress hides keys from single heads of this model (AdaKVPress and others), and {attention} would "
            "attend to them all the same. What works: rope, alibi, t5 or nope under "
            "model.set_attn_implementation('sdpa'), or reading the text again without the press."
        )
    return True


def _split(
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
            f"a scheme with split scores cannot run under attn_implementation={name!r}: it takes the scores over. "
            "Use model.set_attn_implementation('sdpa') or 'eager'."
        )
    altered = sorted(name for name in ("softcap", "s_aux") if kwargs.get(name) is not None)
    if altered:
        raise UnsupportedSwapError(
            f"{type(module).__name__} alters its attention scores ({', '.join(altered)}), which a scheme with split "
            "scores does not do. What works: rope, alibi, nope."
        )
    return attend_split(
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
        memo=call.held(),
    )


def implementation(module: nn.Module, config: Any, name: str | None) -> tuple[Callable[..., Any], Any]:
    """Return the attention function called `name` for `module`, whose model has `config`, and what to call it with."""
    if name == "sdpa":  # asked for in each layer of each step: no more than needed
        return attention_function(name, None), module
    if name == "eager" and getattr(module, "reorder_and_upcast_attn", False):  # GPT-2's own float32 attention
        return _upcast_eager, module
    eager = getattr(module, "eager_attention", None) or eager_function(type(module))
    attend = attention_function(name, eager)
    if name is not None and ("flash" in name or name.startswith("paged")):
        return attend, _WithConfig(module, config)  # these read the implementation's name from module.config
    return attend, module


def has_interface(module: nn.Module) -> bool:
    """Return whether the class of `module` attends through transformers' AttentionInterface and passes kwargs on."""
    cls = type(module)
    passes = any(p.kind is p.VAR_KEYWORD for p in forward_parameters(cls).values())
    asks = attends_by_interface(cls) and eager_function(cls) is not None
    cached = hasattr(module, "layer_idx") and bool(cache_names(cls))
    known = hasattr(module, "config") and (cached or getattr(module, "is_causal", True) is False)
    return passes and asks and known


class _WithConfig:
    """A module, except that its config is the model's own."""

    def __init__(self, module: nn.Module, config: Any) -> None:
        self._module, self.config = module, config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _upcast_eager(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: Any
) -> tuple[Tensor, Tensor]:
    return upcast_attention(module, query, key, value, mask)


def _with_bias(
    call: AttentionCall,
    mask: Any,
    kwargs: dict[str, Any],
    name: str | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
) -> tuple[Any, dict[str, Any]]:
    """Return the mask and kwargs that carry the bias of `call` into the implementation called `name`."""
    if name == "flex_attention":
        bias: Any = call.bias()
        return mask, {**kwargs, "position_bias": bias.to(query.dtype).expand(query.shape[0], -1, -1, -1)}
    if name not in (None, "eager", "sdpa"):
        raise UnsupportedSwapError(
            f"a bias scheme cannot run under attn_implementation={name!r}: it has no place for a bias. "
            "Use model.set_attn_implementation('sdpa'), 'eager' or 'flex_attention'."
        )

    def make(bias: Tensor) -> Tensor:
        return additive_mask(bias, mask, causal=is_causal(module, kwargs), query=query, key=key)

    return call.biased_mask(mask, query.dtype, make), kwargs


def register_attention() -> None:
    """Make `posswap_attention` known to transformers, with the mask that sdpa takes, and what its caches need."""
    register_attention_function(ATTENTION_NAME, posswap_attention)
    key_positions.prepare()
    prepare_views()
