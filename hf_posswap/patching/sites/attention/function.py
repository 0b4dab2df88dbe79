"""The attention site: a scheme between a model's projections and its own attention implementation.

No forward is copied. A patched attention module gets a view of its config that names `posswap_attention`; a pre-hook
finds the true positions and, where a scheme allows, lets the cache store rotated keys; the function applies the
scheme and delegates to the implementation that the model's own config names.

In a graph of torch.compile attention is one operator, in which a backend is chosen as in a call that is not compiled:
backends look at the numbers of masks and positions, which a graph that is being traced does not have; the operator has
them each time that it runs. So a graph is for all lengths, masks and positions, and holds no scores. The backward runs
the call once more, so that none are held for it either.
"""

from __future__ import annotations

import copy
import operator
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from hf_posswap.compat.torch_dispatch import is_exporting, uncaptured, with_autograd
from hf_posswap.compat.torch_tensors import transforms_active
from hf_posswap.compat.transformers_attention import (
    IMPLEMENTATION,
    attends_by_interface,
    attention_function,
    attention_implementation,
    eager_function,
    has_masked_keys,
    register_attention_function,
    upcast_attention,
)
from hf_posswap.compat.transformers_calls import cache_names, forward_parameters, prepare_views
from hf_posswap.errors import PosswapError, UnsupportedSwapError
from hf_posswap.patching.sites.attention import backends, cached_keys
from hf_posswap.patching.sites.attention.backends import Request
from hf_posswap.patching.sites.attention.call import CALL_ARGUMENT, AttentionCall, is_causal
from hf_posswap.patching.sites.attention.forward_memo import ForwardMemo, Span
from hf_posswap.patching.sites.attention.positions import refuse_packed
from hf_posswap.patching.sites.attention.split_attention import attend_split
from hf_posswap.schemes.common.piece import Keys
from hf_posswap.schemes.mechanism import Mechanism, numbered
from hf_posswap.utils.devices import as_attended

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx
    from transformers import PreTrainedConfig

    from hf_posswap.compat.transformers_attention import Attention

    class _Context(FunctionCtx):
        """What the forward keeps for the backward."""

        saved_tensors: tuple[Tensor, ...]
        settings: tuple[object, ...]


WITH_SCORES = (None, "eager", "paged|eager", "sdpa")
"""The implementations that take a bias in their mask, and whose scores a scheme may compute: "paged|eager" is eager's
name in continuous batching."""
# Code from a checkpoint has another name: several versions of the package may run in one process.
ATTENTION_NAME = "posswap" if __name__.startswith("hf_posswap.") else f"posswap_{zlib.crc32(__name__.encode()):08x}"
OPERATOR = f"{re.sub(r'[^A-Za-z0-9]+', '_', __name__)}::attend"
"""Of this module's own name: a checkpoint's own code may be another copy of the package."""
UNCAPTURED = uncaptured()
"""Of an operator that reads numbers from a GPU while it runs; empty: a graph on a GPU cannot contain it."""
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor query_positions, Tensor? key_positions, "
    "Tensor[] parameters, Tensor number, float scaling, bool causal, str keys"
)


class ConfigView:
    """The config of a patched attention module.

    The name of the attention implementation is the plugin's; every other attribute is read from, and written to, the
    model's own config, so the model's `set_attn_implementation` still works. Copies and pickles like any object.
    """

    def __init__(self, native: PreTrainedConfig) -> None:
        object.__setattr__(self, "native", native)

    def __getattr__(self, name: str) -> Any:
        if name == IMPLEMENTATION:
            return ATTENTION_NAME
        if name == "native" or (name.startswith("__") and name.endswith("__")):  # while being unpickled or copied
            raise AttributeError(name)
        return getattr(self.native, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.native, name, value)

    def __getstate__(self) -> dict[str, object]:
        return {"native": self.native}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        object.__setattr__(self, "native", state["native"])

    def __repr__(self) -> str:
        return f"ConfigView({type(self.native).__name__})"


def posswap_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
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
        raise PosswapError(
            f"{type(module).__name__} reached the {ATTENTION_NAME!r} attention function without a scheme. Do not set "
            f"attn_implementation={ATTENTION_NAME!r}: use hf_posswap.patch_model, and 'sdpa' or 'eager' here."
        )
    call.used = True
    native = module.config.native if isinstance(module.config, ConfigView) else module.config
    name, attend = _named(call.memo, native)
    refuse_packed(call.memo, name, attention_mask)
    if call.memo.drops_bias:
        kwargs.pop("position_bias", None)
    query, key = call.rotate(query, key)
    query = call.scaled(query)
    if call.mechanism.biases and name == "sdpa":  # sdpa takes masks of the dtype that autocast gives the rest
        query, key, value = as_attended(query, key, value)
    if call.mechanism.watches:
        call.mechanism.watch(query, key, kwargs.get("scaling"), attention_mask, kwargs.get("sliding_window"))
    masks_by_head = _masks_by_head(call, module, name, query, key)
    # for one query all backends are the same
    if query.shape[2] > 1 and not masks_by_head and backends.backends_of(call.mechanism):
        attended = attend_by_backend(call, call.request(module, name, query, key, value, attention_mask, kwargs))
        if attended is not None:
            return attended, None
    if call.mechanism.splits:
        return _split(call, module, name, query, key, value, attention_mask, kwargs)
    as_tensor = name != "flex_attention" or backends.is_learned(call.mechanism)
    if not as_tensor and (read := call.flex_bias(len(query))) is not None:
        kwargs = {**kwargs, "position_bias": read}
    elif call.mechanism.biases:
        attention_mask, kwargs = _with_bias(call, attention_mask, kwargs, name, module, query, key)
    if attend is not None:
        return attend(module, query, key, value, attention_mask, **kwargs)
    attend, target = implementation(module, native, name)
    return attend(target, query, key, value, attention_mask, **kwargs)


def _named(memo: ForwardMemo, config: PreTrainedConfig) -> tuple[str | None, Attention | None]:
    """Return the name of the implementation that `config` names, and for sdpa the function under it.

    Asking transformers is slow in each layer of a step: layers of one forward that share a config share the answer.
    """
    known = memo.attends
    if known is not None and known[0] is config:
        return known[1:]
    name = attention_implementation(config)
    attend = attention_function(name, None) if name == "sdpa" else None
    if memo.in_forward:
        memo.attends = config, name, attend
    return name, attend


def _masks_by_head(call: AttentionCall, module: nn.Module, name: str | None, query: Tensor, key: Tensor) -> bool:
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
    module: nn.Module,
    name: str | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Attend in the pieces of a scheme, as the implementation called `name` would."""
    if name not in WITH_SCORES:
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
        memo=call.kept_keys(),
    )


def implementation(module: nn.Module, config: PreTrainedConfig, name: str | None) -> tuple[Attention, object]:
    """Return the attention function called `name` for `module`, whose model has `config`, and what to call it with."""
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

    def __init__(self, module: nn.Module, config: PreTrainedConfig) -> None:
        self._module, self.config = module, config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _upcast_eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: object
) -> tuple[Tensor, Tensor | None]:
    return upcast_attention(module, query, key, value, mask)


def _with_bias(
    call: AttentionCall,
    mask: Tensor | None,
    kwargs: dict[str, object],
    name: str | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
) -> tuple[Tensor | None, dict[str, Any]]:
    """Return the mask and kwargs that carry the bias of `call` into the implementation called `name`."""
    if name == "flex_attention":
        bias: Any = call.bias()
        return mask, {**kwargs, "position_bias": bias.to(query.dtype).expand(query.shape[0], -1, -1, -1)}
    if name not in WITH_SCORES:
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
    cached_keys.prepare()
    prepare_views()


def attend_by_backend(call: AttentionCall, request: Request) -> Tensor | None:
    """Return attention [B, Q, H, Dv] of `request`; None: by the formula, which is elsewhere."""
    if not _is_held(request, request.query.device.type):
        return backends.attend(request, call.pieces)
    span, mechanism = request.span, request.mechanism
    return _attend(
        request.query, request.key, request.value, request.mask, span.query, None if span.is_prefill else span.key,
        list(mechanism.parameters()), mechanism.number, request.scaling, request.causal, call.keys,
    )  # fmt: skip


def _is_held(request: Request, device: str) -> bool:
    """Return whether a traced graph for a type of `device` should contain `request` as the operator, not the formula.

    So it is where another backend than the formula applies: on a CPU at any length, on a GPU where one gains. For
    shorter texts a GPU has a graph of its own with the formula, which the compiler fuses with what is around it.
    """
    if not torch.compiler.is_dynamo_compiling() or is_exporting() is not False or request.mechanism.backend == "plain":
        return False
    if len(backends.backends_of(request.mechanism)) < 2 or request.alters or device not in ("cpu", "cuda"):
        return False
    if device == "cuda" and not (UNCAPTURED and backends.gains_on_gpu(request)):
        return False
    if type(request.query) is not Tensor or transforms_active():  # they have no rule for the operator
        return False
    if request.mechanism.splits and torch.is_autocast_enabled(device):  # rotated tensors are narrowed only then
        return False
    return request.mask is None or not request.mask.requires_grad


@torch.library.custom_op(OPERATOR, mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor", **UNCAPTURED)
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    query_positions: Tensor,
    key_positions: Tensor | None,
    parameters: list[Tensor],
    number: Tensor,
    *settings: Any,
) -> Tensor:
    """Return attention [B, Q, H, Dv].

    Args:
        query: [B, H, Q, D].
        key: [B, G, K, D], or as many of them side by side as the mechanism has the cache hold.
        value: [B, G, K, Dv].
        mask: bool or additive, [B or 1, 1, Q, K].
        query_positions: [B or 1, Q].
        key_positions: [B or 1, K]; None: those of the queries.
        parameters: of the mechanism, which may be others than it has.
        number: of the mechanism.
        settings: scaling, which multiplies the scores; whether a left-out mask means causal; how keys come, see
            `AttentionCall`.
    """
    mechanism = _with_parameters(numbered(number), parameters)
    return _attended(mechanism, query, key, value, mask, query_positions, key_positions, *settings)


@_attend.register_fake
def _shape(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, value.shape[-1])


@torch.library.custom_op(
    f"{OPERATOR}_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_ARGUMENTS}, bool[] learned) -> Tensor[]",
    **UNCAPTURED,
)
def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    query_positions: Tensor,
    key_positions: Tensor | None,
    parameters: list[Tensor],
    number: Tensor,
    *settings: Any,
) -> list[Tensor]:
    """Return the gradients of query, key, value and `parameters`, from that of what `_attend` returned.

    The last of `settings` says of which parameters they are wanted; those of the others are zeros.
    """
    *settings_of_call, wanted = settings
    mechanism = _with_parameters(numbered(number), parameters, wanted)
    named = zip(mechanism.named_parameters(), wanted, strict=True)
    learned = {name: x for (name, x), is_wanted in named if is_wanted}
    with with_autograd():
        query, key, value = (x.detach().requires_grad_() for x in (query, key, value))
        out = _attended(mechanism, query, key, value, mask, query_positions, key_positions, *settings_of_call)
        inputs = query, key, value, *learned.values()
        gradients = torch.autograd.grad(out, inputs, grad, materialize_grads=True)
    of_tokens = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in gradients[:3]]
    of_learned = dict(zip(learned, gradients[3:], strict=True))
    others = [of_learned.get(name, torch.zeros_like(x)) for name, x in mechanism.named_parameters()]
    return [*of_tokens, *(x.contiguous() for x in others)]


@_attend_backward.register_fake
def _shapes(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> list[Tensor]:
    of_tokens = [x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (query, key, value)]
    return [*of_tokens, *(x.new_empty(x.shape) for x in rest[3])]


def _save(ctx: _Context, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, parameters, number = inputs[:8]
    ctx.save_for_backward(*tensors, number, *parameters)
    ctx.settings = inputs[8:]


def _backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | list[Tensor] | None, ...]:
    *tensors, number = ctx.saved_tensors[:7]
    parameters = list(ctx.saved_tensors[7:])
    wanted = [parameter.requires_grad for parameter in parameters]
    to_query, to_key, to_value, *others = _attend_backward(grad, *tensors, parameters, number, *ctx.settings, wanted)
    return to_query, to_key, to_value, None, None, None, others, None, None, None, None


_attend.register_autograd(_backward, setup_context=_save)


def _attended(
    mechanism: Mechanism,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    query_positions: Tensor,
    key_positions: Tensor | None,
    scaling: float,
    causal: bool,
    keys: str,
) -> Tensor:
    span = Span(query_positions, key.shape[2], key_positions is None, key_positions)
    call = AttentionCall(mechanism, span, ForwardMemo(in_forward=True), cast("Keys", keys))
    arguments = {"is_causal": causal, "scaling": scaling}
    request = call.request(None, "sdpa", query, key, value, mask, arguments)
    attended = backends.attend(request, call.pieces)
    return (_by_formula(call, request) if attended is None else attended).contiguous()


def _by_formula(call: AttentionCall, request: Request) -> Tensor:
    query, key, value, mask = request.query, request.key, request.value, request.mask
    if request.mechanism.splits:
        attended, _ = attend_split(
            query, key, value, call.pieces(), call.span.query, call.span.key, mask,
            causal=request.causal, scaling=request.scaling,
        )  # fmt: skip
        return attended
    bias = call.bias()
    assert bias is not None, "a mechanism with backends splits or biases"
    added = additive_mask(bias, mask, causal=request.causal, query=query, key=key)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=added, scale=request.scaling, enable_gqa=request.share > 1
    )
    return attended.transpose(1, 2)


def _with_parameters(mechanism: Mechanism, parameters: list[Tensor], wanted: Sequence[bool] = ()) -> Mechanism:
    """Return `mechanism`, or a copy with `parameters` where those differ, as in a functional call.

    Args:
        mechanism: of the model.
        parameters: to compute with.
        wanted: of which gradients are wanted, though the model's may be frozen; empty: of none.
    """
    current = list(mechanism.parameters())
    is_same = all(a.data_ptr() == b.data_ptr() for a, b in zip(current, parameters, strict=True))
    is_frozen = [not parameter.requires_grad for parameter in current]
    if is_same and not any(map(operator.and_, is_frozen, wanted)):
        return mechanism
    other = copy.deepcopy(mechanism)
    for parameter, given in zip(other.parameters(), parameters, strict=True):
        parameter.data = given.detach()
    for parameter, is_wanted in zip(other.parameters(), wanted, strict=False):
        parameter.requires_grad_(is_wanted)
    return other


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
