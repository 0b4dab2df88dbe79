"""Schemes from functions, whole: a rotation of the pair, a bias of the distance, a query scale of the position."""

from typing import Any

import torch

from hf_posswap.schemes import bias, query_scale, rotation


@rotation("clipped-rope", source="https://arxiv.org/abs/2602.05258")
def clipped_rope(pair: Any, pairs: int, base: float, original_length: int, *, share: float = 1.0) -> Any:
    """RoPE whose pairs stand still where they do not turn once within a share of the window."""
    angles = base ** (-pair / pairs)
    return angles * (angles * original_length * share >= 2 * torch.pi)


@bias("window-bias")
def window_bias(distance: Any, head: Any, heads: int, *, window: int = 64, toll: float = 1.0) -> Any:
    """Keys outside a window cost a toll, less in every further head."""
    return -toll * (1 - head / heads) * (distance.abs() >= window)


@query_scale("log-scale")
def log_scale(position: Any, original_length: int, *, c: float = 0.1) -> Any:
    """1 + c ln(n / L) beyond the window L."""
    return 1 + c * ((position + 1) / original_length).clamp(min=1).log()
