"""RoPE and ALiBi written otherwise, put into stock models from outside: what a swapped model must equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_posswap.families import locate
from hf_posswap.families.modules import table_of
from hf_posswap.families.sites import Stack
from hf_posswap.schemes.alibi import slopes


def without_tables(model: Any) -> Any:
    """Return `model`, a stock one, with every position table of its stacks zero."""
    for stack in locate(model).stacks:
        with torch.no_grad():
            table_of(model.get_submodule(stack.table_path or "")).zero_()
    return model


def turn(heads: int, width: int | None = None, positions: Tensor | None = None) -> Callable[[Any, Any, Tensor], Tensor]:
    """Return a hook that rotates what a projection gives, [B, Q, H D ...], by complex numbers.

    Args:
        heads: H.
        width: H D, the rest of the projection being something else; None: all of it.
        positions: of the tokens, [Q]; None: their index.
    """

    def hook(_module: Any, _args: Any, out: Tensor) -> Tensor:
        turning, rest = out[..., :width], out[..., width:] if width else out[..., :0]
        batch, length, size = turning.shape
        half = size // heads // 2
        pairs = turning.view(batch, length, heads, 2, half)
        speeds = 10000.0 ** (-torch.arange(half) / half)
        where = torch.arange(length) if positions is None else positions
        angle = torch.polar(torch.ones(()), where[:, None] * speeds)[None, :, None]  # [1, Q, 1, D/2]
        turned = torch.complex(pairs[..., 0, :], pairs[..., 1, :]) * angle
        return torch.cat((torch.stack((turned.real, turned.imag), dim=-2).reshape(turning.shape), rest), dim=-1)

    return hook


def rotated(model: Any, stack: Stack, projections: tuple[str, str], positions: Tensor | None = None) -> Any:
    """Return `model`, a stock one, whose query and key projections, by these names, rotate what they give."""
    for path in stack.attention:
        for name in projections:
            projection = model.get_submodule(f"{path}.{name}")
            projection.register_forward_hook(turn(stack.geometry.num_heads, positions=positions))
    return model


def penalty(heads: int, length: int, *, causal: bool) -> Tensor:
    """Return ALiBi's bias as an additive mask, [1, H, Q, Q]."""
    position = torch.arange(length)
    distance = (position[:, None] - position[None, :]).abs().float()
    bias = -torch.tensor(slopes(heads))[None, :, None, None] * distance
    return bias.masked_fill((position[None, :] > position[:, None]) & causal, torch.finfo(torch.float32).min)
