"""Attention with a bias that is computed for one block of queries at a time, forward and backward.

For a learned bias, the backward recomputes each block's scores and passes the gradient of the bias to its owner, so
that no [Q, K] tensor outlives a block. Otherwise a fused backward is used.

Dao et al. 2022, https://arxiv.org/abs/2205.14135, appendix B.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_posswap.kernels import fused
from hf_posswap.utils.devices import without_autocast


class Block(NamedTuple):
    """A block of queries of some heads, and a range of keys that contains all visible ones.

    With grouped heads, `heads` are those of some groups, or some of one group's.
    """

    rows: slice
    queries: slice
    keys: slice
    heads: slice = slice(None)

    def indices(self, share: int) -> tuple[tuple[slice, slice, slice], tuple[slice, slice, slice]]:
        """Return the indices of the queries and of the keys, if `share` heads share a key."""
        groups = self.heads
        if groups != slice(None):
            groups = slice(groups.start // share, -(-groups.stop // share))
        return (self.rows, self.heads, self.queries), (self.rows, groups, self.keys)


class BlockBias(Protocol):
    """Computes the bias of a block of queries, and accumulates its gradient."""

    parameters: tuple[Tensor, ...]
    """The tensors that the bias depends on, which may need gradients."""

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks. Each query of a head is in at most one; one in none attends to nothing and outputs zero."""

    def make(self, block: Block) -> Tensor:
        """Return the bias of a block, [1 or b, h, q, k]; -inf, or the lowest number, masks."""

    def gradient(self, change: Tensor, block: Block) -> None:
        """Accumulate the gradient of the result of `make`, [b, h, q, k]."""

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Return the accumulated gradients of `parameters`."""


def attend(query: Tensor, key: Tensor, value: Tensor, bias: BlockBias, *, scaling: float) -> Tensor:
    """Return attention [B, H, Q, D] with a bias that includes the mask.

    Args:
        query: [B, H, Q, D].
        key: [B, G, K, D].
        value: [B, G, K, D].
        bias: computed block by block, only for this call.
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
        # memory layout for the following layer
        whole = query.new_zeros(batch, length, heads, width).transpose(1, 2)
        total = torch.zeros(query.shape[:3], dtype=fused.bias_dtype(query.dtype), device=query.device)
        for block in bias.blocks():
            query_index, key_index = block.indices(query.shape[1] // key.shape[1])
            whole[query_index], total[query_index] = fused.forward(
                query[query_index],
                key[key_index],
                value[key_index],
                scaling=scaling,
                causal=False,
                bias=bias.make(block),
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
            query_index, key_index = block.indices(query.shape[1] // key.shape[1])
            arguments = (
                grad[query_index],
                query[query_index],
                key[key_index],
                value[key_index],
                out[query_index],
                sums[query_index],
            )
            block_bias = bias.make(block)
            if learned:
                with without_autocast(query):
                    *block_grads, change = written_out(*arguments, scaling=ctx.scaling, bias=block_bias)
                    bias.gradient(change, block)
            else:
                block_grads = list(fused.backward(*arguments, scaling=ctx.scaling, causal=False, bias=block_bias))
            for grad_sum, block_grad, span in zip(grads, block_grads, (query_index, key_index, key_index), strict=True):
                grad_sum[span] += block_grad
        return None, None, *grads, *(bias.gradients() if learned else (None,) * len(bias.parameters))


def written_out(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, *, scaling: float, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and of the bias [B, H, Q, K], from recomputed scores."""
    groups = key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)

    def by_group(x: Tensor) -> Tensor:  # [B, G, H/G Q, D]
        return x.unflatten(1, (groups, -1)).flatten(2, 3).to(wide)

    queries, rows = by_group(query), by_group(grad)
    keys, values = key.to(wide), value.to(wide)
    scores = torch.matmul(queries, keys.transpose(-1, -2)).mul_(scaling)  # [B, G, H/G Q, K]
    shape = (*query.shape[:3], key.shape[2])
    probabilities = scores.view(shape).add_(bias).sub_(sums[..., None]).exp_()  # [B, H, Q, K]
    heads = probabilities.view(scores.shape)
    to_value = torch.matmul(heads.transpose(-1, -2), rows)
    delta = (grad.to(wide) * out.to(wide)).sum(dim=-1, keepdim=True)  # [B, H, Q, 1]
    bias_grad = torch.matmul(rows, values.transpose(-1, -2)).view(shape).sub_(delta).mul_(probabilities)
    by_head = bias_grad.view(scores.shape)
    to_query = torch.matmul(by_head, keys).mul_(scaling).view(query.shape)
    to_key = torch.matmul(by_head.transpose(-1, -2), queries).mul_(scaling)
    return to_query.to(query.dtype), to_key.to(key.dtype), to_value.to(value.dtype), bias_grad
