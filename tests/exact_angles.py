"""Stock models whose rotary modules compute in float64: what a swap with exact angles is held against.

Stock classes multiply positions and theta_i in float32. A swap that is exact differs from them by that rounding, which
would ask for wide bounds; with the rounding taken out, only the order of sums is left.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

M = TypeVar("M", bound=nn.Module)


class _Float64(TorchFunctionMode):
    """What asks for float32 gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def with_exact_angles(model: M) -> M:
    """Let every rotary module of `model`, a stock one, compute frequencies, angles, cos and sin in float64."""
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding") and hasattr(module, "inv_freq"):
            _make_exact(module)
    return model


def _make_exact(module: Any) -> None:
    rope_type = getattr(module, "rope_type", "default")
    init = module.compute_default_rope_parameters if rope_type == "default" else ROPE_INIT_FUNCTIONS[rope_type]
    with _Float64():
        inv_freq, _ = init(module.config, device="cpu")
    assert inv_freq.dtype == torch.float64
    torch.testing.assert_close(inv_freq.float(), module.inv_freq, rtol=1e-5, atol=0)  # the same, but for rounding
    module.inv_freq = inv_freq
    stock = module.forward

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        with _Float64():
            cos, sin = stock(x.double(), position_ids)
        return cos.to(x.dtype), sin.to(x.dtype)

    module.forward = forward
