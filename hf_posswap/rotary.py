"""Rotation of queries and keys: the arithmetic that every rotary scheme shares.

Shapes: B batch, Q length, H heads, D head dim, R rotary dim (R <= D, even).
Source: Su et al. 2021, https://arxiv.org/abs/2104.09864, equation 15.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_posswap.geometry import Layout


class Frequencies(NamedTuple):
    """Angles per position of each rotary pair, and the factor on cos and sin.

    Attributes:
        inv_freq: radians per position, shape [R/2], float32.
        attention_factor: multiplies cos and sin, so attention logits change by its square.
    """

    inv_freq: Tensor
    attention_factor: float = 1.0


class CosSin(NamedTuple):
    """cos and sin of every position and pair, half width: [B or 1, 1, Q, R/2], float32."""

    cos: Tensor
    sin: Tensor


def default_inv_freq(base: float, dim: int) -> Tensor:
    """Return theta_i = base^(-2i/dim) for i in 0..dim/2-1, shape [dim/2], float32 on the CPU.

    Example:
        >>> default_inv_freq(10000.0, 4)
        tensor([1.0000, 0.0100])
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim  # [dim/2]
    return 1.0 / (base**exponents)


def cos_sin(positions: Tensor, frequencies: Frequencies) -> CosSin:
    """Return cos and sin, times the attention factor, of `positions` [B or 1, Q]: always float32."""
    angles = positions[:, None, :, None].float() * frequencies.inv_freq  # [B, 1, Q, R/2]
    factor = frequencies.attention_factor
    return CosSin(angles.cos() * factor, angles.sin() * factor)


def rotate(x: Tensor, table: CosSin, layout: Layout) -> Tensor:
    """Rotate the first R of D dimensions of `x` [B, H, Q, D] by the angles of `table`; the rest passes.

    The arithmetic is done in the wider of x's dtype and float32, the result has x's dtype. In float32 it equals
    `q * cos + rotate_half(q) * sin` of transformers bit by bit.

    Example:
        >>> x = torch.tensor([[[[1.0, 0.0]]]])  # B = H = Q = 1, D = 2
        >>> quarter = Frequencies(torch.tensor([torch.pi / 2]))
        >>> rotate(x, cos_sin(torch.tensor([[1]]), quarter), "half").round().abs()
        tensor([[[[0., 1.]]]])
    """
    cos, sin = table
    width = 2 * cos.shape[-1]
    rotated, passed = x[..., :width], x[..., width:]
    if layout == "half":
        first, second = rotated.chunk(2, dim=-1)  # [B, H, Q, R/2] each
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    else:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    turned = turned.to(x.dtype)
    return turned if passed.shape[-1] == 0 else torch.cat((turned, passed), dim=-1)
