"""Attention with a bias that is made for one block of queries at a time, forward and backward.

Where the bias is learned, the backward makes each block's scores once more and hands the gradient of the bias to
whoever made it, so that nothing of [Q, K] outlives a block. Where it is not, a fused backward does.

Dao et al. 2022, https://arxiv.org/abs/2205.14135, appendix B.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_posswap.kernels import fused
from hf_posswap.utils.autocast import without_autocast


class Block(NamedTuple):
    """Some queries, and the keys that hold all that they see."""

    rows: slice
    queries: slice
    keys: slice


class BlockBias(Protocol):
    """Makes the bias of a block of queries, and takes its gradient."""

    parameters: tuple[Tensor, ...]
    """What the bias is made of, and may need a gradient."""

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks, each query of a row in one at most; those in none attend to nothing, and get zeros."""

    def make(self, block: Block) -> Tensor:
        """Return the bias of a block, [1 or b, H, q, k]; -inf, or the lowest number, masks."""

    def gradient(self, change: Tensor, block: Block) -> None:
        """Take the gradient of what `make` returned, [b, H, q, k]."""

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of `parameters`, from all that `gradient` took."""


def attend(query: Tensor, key: Tensor, value: Tensor, bias: BlockBias, *, scaling: float) -> Tensor:
    """Return attention [B, H, Q, D] with a bias that also says what is masked.

    Args:
        query: [B, H, Q, D].
        key: [B, G, K, D].
        value: [B, G, K, D].
        bias: made block by block, for this call alone.
        scaling: multiplies the scores.
    """
    return _Blockwise.apply(bias, scaling, query, key, value, *bias.parameters)


class _Blockwise(torch.autograd.Function):
    """`attend`, with its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        bias: BlockBias,
        scaling: float,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        batch, heads, length, width = query.shape
        # laid out as the layer that follows wants it
        whole = query.new_zeros(batch, length, heads, width).transpose(1, 2)
        total = torch.zeros(query.shape[:3], dtype=fused.bias_dtype(query.dtype), device=query.device)
        for block in bias.blocks():
            asked, seen = (block.rows, slice(None), block.queries), (block.rows, slice(None), block.keys)
            whole[asked], total[asked] = fused.forward(
                query[asked], key[seen], value[seen], scaling=scaling, causal=False, bias=bias.make(block)
            )
        ctx.save_for_backward(query, key, value, whole, total, *parameters)
        ctx.bias, ctx.scaling = bias, scaling
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums, *_ = ctx.saved_tensors
        bias, learned = ctx.bias, any(ctx.needs_input_grad[5:])
        grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for block in bias.blocks():
            asked, seen = (block.rows, slice(None), block.queries), (block.rows, slice(None), block.keys)
            arguments = grad[asked], query[asked], key[seen], value[seen], out[asked], sums[asked]
            made = bias.make(block)
            if learned:
                with without_autocast(query):
                    *parts, change = written_out(*arguments, scaling=ctx.scaling, bias=made)
                    bias.gradient(change, block)
            else:
                parts = list(fused.backward(*arguments, scaling=ctx.scaling, causal=False, bias=made))
            for whole, part, span in zip(grads, parts, (asked, seen, seen), strict=True):
                whole[span] += part
        return None, None, *grads, *(bias.gradients() if learned else (None,) * len(bias.parameters))


def written_out(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, *, scaling: float, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and of the bias [B, H, Q, K], from scores that are made once more."""
    groups = key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)

    def by_group(x: Tensor) -> Tensor:  # [B, G, H/G Q, D]
        return x.unflatten(1, (groups, -1)).flatten(2, 3).to(wide)

    queries, rows = by_group(query), by_group(grad)
    keys, values = key.to(wide), value.to(wide)
    scores = torch.matmul(queries, keys.transpose(-1, -2)).mul_(scaling)  # [B, G, H/G Q, K]
    shape = (*query.shape[:3], key.shape[2])
    chances = scores.view(shape).add_(bias).sub_(sums[..., None]).exp_()  # [B, H, Q, K]
    heads = chances.view(scores.shape)
    to_value = torch.matmul(heads.transpose(-1, -2), rows)
    delta = (grad.to(wide) * out.to(wide)).sum(dim=-1, keepdim=True)  # [B, H, Q, 1]
    change = torch.matmul(rows, values.transpose(-1, -2)).view(shape).sub_(delta).mul_(chances)
    by_head = change.view(scores.shape)
    to_query = torch.matmul(by_head, keys).mul_(scaling).view(query.shape)
    to_key = torch.matmul(by_head.transpose(-1, -2), queries).mul_(scaling)
    return to_query.to(query.dtype), to_key.to(key.dtype), to_value.to(value.dtype), change
