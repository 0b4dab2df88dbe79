"""The query and key projections of a model's heads: where they lie, and a change of basis that keeps every score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_posswap.compat.peft_wrappers import is_adapted
from hf_posswap.errors import UnsupportedSwapError

_PAIRS = (("q_proj", "k_proj"), ("query", "key"), ("q_lin", "k_lin"))
_FUSED = ("c_attn",)  # queries, keys and values, one after the other


@dataclass(frozen=True)
class Projection:
    """Rows of one linear module that make the queries, or the keys, of one attention.

    Attributes:
        module: Linear, or transformers' Conv1D, which lies the other way round.
        first: the row that the first head begins with.
        heads: H.
        head_dim: D.
    """

    module: nn.Module
    first: int
    heads: int
    head_dim: int

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self._parts()[0].dtype

    def read(self) -> tuple[Tensor, Tensor]:
        """Return copies of weight [H, D, E] and bias [H, D], float64 on the CPU."""
        weight, bias = self._parts()
        shape = (self.heads, self.head_dim)
        held = (part.to("cpu", torch.float64, copy=True) for part in (weight, bias))  # never the model's own numbers
        weight, bias = (part.unflatten(0, shape) for part in held)
        return weight, bias

    @torch.no_grad()
    def write(self, weight: Tensor, bias: Tensor) -> None:
        """Put `weight` [H, D, E] and `bias` [H, D] in place, in the dtype and on the device of the model."""
        for held, new in zip(self._parts(), (weight, bias), strict=True):
            held.copy_(new.flatten(0, 1))

    def _parts(self) -> tuple[Tensor, Tensor]:
        weight: Any = self.module.weight
        bias: Any = self.module.bias
        rows = slice(self.first, self.first + self.heads * self.head_dim)
        return (weight.data.T if isinstance(self.module, Conv1D) else weight.data)[rows], bias.data[rows]


def find_projections(attention: nn.Module, heads: int, head_dim: int) -> tuple[Projection, Projection]:
    """Return the projections that make the queries and the keys of `attention`.

    Raises:
        UnsupportedSwapError: they are not found, or lie in an adapter, or have no bias, in which constant vectors could
            lie.
    """
    children = {path.rpartition(".")[2]: module for path, module in attention.named_modules()}
    width = heads * head_dim
    for query, key in _PAIRS:
        if query in children and key in children:
            found = Projection(children[query], 0, heads, head_dim), Projection(children[key], 0, heads, head_dim)
            break
    else:
        fused = next((children[name] for name in _FUSED if name in children), None)
        if fused is None:
            known = ", ".join([*(" and ".join(pair) for pair in _PAIRS), *_FUSED])
            raise UnsupportedSwapError(
                f"{type(attention).__name__} has no query and key projections that are known here ({known})."
            )
        found = Projection(fused, 0, heads, head_dim), Projection(fused, width, heads, head_dim)
    for part in found:
        module = part.module
        if is_adapted(module):
            raise UnsupportedSwapError(
                f"{type(attention).__name__}: an adapter lies around its queries or keys, and they are to be fitted "
                "themselves. Fit the model before an adapter is put on it, or merge_and_unload() first."
            )
        if not isinstance(module, nn.Linear | Conv1D) or getattr(module, "bias", None) is None:
            raise UnsupportedSwapError(
                f"{type(attention).__name__}: its {type(module).__name__} has no bias, and what a head is to score by "
                "distance alone is kept in biases of queries and keys. What works: GPT-2, OPT, BERT and their kind."
            )
    return found


def balanced_bases(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each head two matrices that keep every score and order its dimensions by what they add to it.

    With q' = M q and k' = M^-T k, q'.k' = q.k. M is chosen so that the second moment of q' and the covariance of k' are
    the same diagonal matrix (balanced coordinates: Moore 1981, https://doi.org/10.1109/TAC.1981.1102568), its entries
    rising: a pair of dimensions with a small entry adds little to any score. Of the keys the covariance counts, as a
    softmax does not see what all keys of a query have in common.

    Args:
        queries: [H, N, D], float64.
        keys: [H, N, D], float64.

    Returns:
        M [H, D, D] for queries, and M^-T [H, D, D] for keys.

    Example:
        >>> q, k = torch.randn(2, 1, 50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> for_queries, for_keys = balanced_bases(q, k)
        >>> torch.allclose(q @ for_queries.mT @ for_keys @ k.mT, q @ k.mT)
        True
    """
    moment = queries.mT @ queries / queries.shape[1]
    centred = keys - keys.mean(dim=1, keepdim=True)
    spread = centred.mT @ centred / keys.shape[1]
    little = _RELATIVE * spread.diagonal(dim1=1, dim2=2).mean(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    root = torch.linalg.cholesky(spread + little[:, None, None] * torch.eye(keys.shape[2], dtype=torch.float64))
    squares, turn = torch.linalg.eigh(root.mT @ moment @ root)  # rising
    largest = squares[:, -1:].clamp(min=torch.finfo(torch.float64).tiny)
    size = squares.clamp(min=_RELATIVE**2 * largest) ** 0.25  # [H, D], square roots of the diagonal's entries
    for_queries = (turn / size[:, None]).mT @ root.mT
    for_keys = (turn * size[:, None]).mT @ torch.linalg.inv(root)
    return for_queries, for_keys


_RELATIVE = 1e-8
"""Directions in which keys or queries move less than this share of their mean do not move."""
