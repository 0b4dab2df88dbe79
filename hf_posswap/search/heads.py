"""The query and key projections of a model's heads, and a change of basis that preserves every score."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_posswap.compat.peft_wrappers import is_adapted
from hf_posswap.compat.torch_tensors import is_plain
from hf_posswap.errors import UnsupportedSwapError

_PAIRS = (("q_proj", "k_proj"), ("query", "key"), ("q_lin", "k_lin"))
_FUSED = ("c_attn",)  # queries, keys and values, concatenated


@dataclass(frozen=True)
class Projection:
    """The rows of one linear module that compute the queries, or the keys, of one attention module.

    Attributes:
        module: Linear, or transformers' Conv1D, whose weight is transposed.
        first: first row of the first head.
        heads: H.
        head_dim: D.
    """

    module: nn.Module
    first: int
    heads: int
    head_dim: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self._weight_and_bias()[0].dtype

    def read(self) -> tuple[Tensor, Tensor]:
        """Return copies of weight [H, D, E] and bias [H, D], float64 on the CPU."""
        weight, bias = self._weight_and_bias()
        shape = (self.heads, self.head_dim)
        copies = (tensor.to("cpu", torch.float64, copy=True) for tensor in (weight, bias))
        weight, bias = (tensor.unflatten(0, shape) for tensor in copies)
        return weight, bias

    @torch.no_grad()
    def write(self, weight: Tensor, bias: Tensor) -> None:
        """Write `weight` [H, D, E] and `bias` [H, D] in the dtype and on the device of the model."""
        for current, new in zip(self._weight_and_bias(), (weight, bias), strict=True):
            current.copy_(new.flatten(0, 1))

    def _weight_and_bias(self) -> tuple[Tensor, Tensor]:
        weight, bias = self.module.weight, self.module.bias
        assert isinstance(weight, Tensor)
        assert isinstance(bias, Tensor)
        rows = slice(self.first, self.first + self.heads * self.head_dim)
        return (weight.data.T if isinstance(self.module, Conv1D) else weight.data)[rows], bias.data[rows]


def find_projections(attention: nn.Module, heads: int, head_dim: int) -> tuple[Projection, Projection]:
    """Return the projections that compute the queries and the keys of `attention`.

    Raises:
        UnsupportedSwapError: they are not found, are quantized or wrapped by an adapter, or have no bias for constant
            vectors.
    """
    children = {path.rpartition(".")[2]: module for path, module in attention.named_modules()}
    width = heads * head_dim
    for query, key in _PAIRS:
        if query in children and key in children:
            projections = Projection(children[query], 0, heads, head_dim), Projection(children[key], 0, heads, head_dim)
            break
    else:
        fused = next((children[name] for name in _FUSED if name in children), None)
        if fused is None:
            known = ", ".join([*(" and ".join(pair) for pair in _PAIRS), *_FUSED])
            raise UnsupportedSwapError(
                f"{type(attention).__name__} has no query and key projections that are known here ({known})."
            )
        projections = Projection(fused, 0, heads, head_dim), Projection(fused, width, heads, head_dim)
    for projection in projections:
        module = projection.module
        if is_adapted(module):
            raise UnsupportedSwapError(
                f"{type(attention).__name__}: an adapter wraps its queries or keys, whose own weights have to be "
                "fitted. Fit the model before adding an adapter, or merge_and_unload() first."
            )
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and not (is_plain(weight) and weight.is_floating_point()):
            raise UnsupportedSwapError(
                f"{type(attention).__name__}: its {type(module).__name__} is quantized ({type(weight).__name__} of "
                f"{weight.dtype}), and the fit writes weights and biases. Load the model without quantization, swap, "
                "fit and save it, and quantize what was saved."
            )
        if not isinstance(module, nn.Linear | Conv1D) or getattr(module, "bias", None) is None:
            raise UnsupportedSwapError(
                f"{type(attention).__name__}: its {type(module).__name__} has no bias, and the fitted scores by "
                "distance are stored in biases of queries and keys. What works: GPT-2, OPT, BERT and similar models."
            )
    return projections


def balanced_bases(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each head two matrices that preserve every score and sort dimensions by their contribution to it.

    With q' = M q and k' = M^-T k, q'.k' = q.k. M is chosen so that the second moment of q' and the covariance of k' are
    the same diagonal matrix (balanced coordinates: Moore 1981, https://doi.org/10.1109/TAC.1981.1102568) with ascending
    entries: a pair of dimensions with a small entry adds little to any score. For keys it is the covariance, because
    softmax ignores a component that all keys share.

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
    covariance = centred.mT @ centred / keys.shape[1]
    ridge = _RELATIVE * covariance.diagonal(dim1=1, dim2=2).mean(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    root = torch.linalg.cholesky(covariance + ridge[:, None, None] * torch.eye(keys.shape[2], dtype=torch.float64))
    squares, turn = torch.linalg.eigh(root.mT @ moment @ root)  # rising
    largest = squares[:, -1:].clamp(min=torch.finfo(torch.float64).tiny)
    size = squares.clamp(min=_RELATIVE**2 * largest) ** 0.25  # [H, D], square roots of the diagonal's entries
    for_queries = (turn / size[:, None]).mT @ root.mT
    for_keys = (turn * size[:, None]).mT @ torch.linalg.inv(root)
    return for_queries, for_keys


_RELATIVE = 1e-8
"""Directions with less than this share of the mean variance are treated as constant."""
