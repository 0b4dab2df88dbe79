"""Attention in a graph of torch.compile: one operator, in which a way is chosen as in a call that is not compiled.

The ways look at the numbers of masks and positions, which a graph that is being traced does not have; the operator has
them each time that it runs. So a graph is for all lengths, masks and positions, and holds no scores. The backward runs
the call once more, so that none are held for it either.
"""

from __future__ import annotations

import copy
import re
from typing import Any, cast

import torch
from torch import Tensor

from hf_posswap.compat.torch_kernels import with_autograd
from hf_posswap.compat.torch_tensors import transforms_active
from hf_posswap.patching.sites.attention import backends
from hf_posswap.patching.sites.attention.additive_mask import additive_mask
from hf_posswap.patching.sites.attention.call import AttentionCall
from hf_posswap.patching.sites.attention.forward_memo import ForwardMemo, Span
from hf_posswap.patching.sites.attention.request import Request
from hf_posswap.patching.sites.attention.split_attention import attend_split
from hf_posswap.schemes.common.numbered import numbered
from hf_posswap.schemes.common.piece import Keys
from hf_posswap.schemes.mechanism import Mechanism

OPERATOR = f"{re.sub(r'[^A-Za-z0-9]+', '_', __name__)}::attend"
"""Of this module's own name: a checkpoint's own code may be another copy of the package."""
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor query_positions, Tensor? key_positions, "
    "Tensor[] parameters, Tensor number, float scaling, bool causal, str keys"
)


def attend(call: AttentionCall, request: Request) -> Tensor | None:
    """Return attention [B, Q, H, Dv] of `request`; None: by the formula, which is elsewhere."""
    if not _is_held(request):
        return backends.attend(request, call.pieces)
    span, mechanism = request.span, request.mechanism
    return _attend(
        request.query, request.key, request.value, request.mask, span.query, None if span.is_prefill else span.key,
        list(mechanism.parameters()), mechanism.number, request.scaling, request.causal, call.keys,
    )  # fmt: skip


def _is_held(request: Request) -> bool:
    """Return whether a traced graph should contain `request` as the operator instead of the formula.

    So it is on a CPU, where another backend than the formula applies.
    """
    if not torch.compiler.is_dynamo_compiling() or _exports() or request.mechanism.backend == "plain":
        return False
    if len(backends.backends_of(request.mechanism)) < 2 or request.alters or request.query.device.type != "cpu":
        return False
    if type(request.query) is not Tensor or transforms_active():  # they have no rule for the operator
        return False
    if request.mechanism.splits and torch.is_autocast_enabled("cpu"):  # rotated tensors are narrowed only then
        return False
    return request.mask is None or not request.mask.requires_grad


def _exports() -> bool:
    """Return whether the graph will run without this package; unknown before torch 2.7."""
    is_exporting = getattr(torch.compiler, "is_exporting", None)
    return is_exporting is None or is_exporting()


@torch.library.custom_op(OPERATOR, mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor")
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
def _shape(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, value.shape[-1])


@torch.library.custom_op(f"{OPERATOR}_backward", mutates_args=(), schema=f"(Tensor grad, {_ARGUMENTS}) -> Tensor[]")
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
    """Return the gradients of query, key, value and `parameters`, from that of what `_attend` returned."""
    mechanism = _with_parameters(numbered(number), parameters)
    learned = {name: x for name, x in mechanism.named_parameters() if x.requires_grad}
    with with_autograd():
        query, key, value = (x.detach().requires_grad_() for x in (query, key, value))
        out = _attended(mechanism, query, key, value, mask, query_positions, key_positions, *settings)
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


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, parameters, number = inputs[:8]
    ctx.save_for_backward(*tensors, number, *parameters)
    ctx.settings = inputs[8:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *tensors, number = ctx.saved_tensors[:7]
    parameters = list(ctx.saved_tensors[7:])
    to_query, to_key, to_value, *others = _attend_backward(grad, *tensors, parameters, number, *ctx.settings)
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


def _with_parameters(mechanism: Mechanism, parameters: list[Tensor]) -> Mechanism:
    """Return `mechanism`, or a copy with `parameters` where those differ, as in a functional call."""
    current = list(mechanism.parameters())
    if all(a.data_ptr() == b.data_ptr() for a, b in zip(current, parameters, strict=True)):
        return mechanism
    other = copy.deepcopy(mechanism)
    for parameter, given in zip(other.parameters(), parameters, strict=True):
        parameter.data = given.detach()
    return other
