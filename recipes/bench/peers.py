"""Equivalents in other packages: `pip install -e ".[bench]"`. Packages that cannot run here are reported."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PEERS = {
    "rotary_embedding_torch": "rotary-embedding-torch",
    "x_transformers": "x-transformers",
    "liger_kernel.ops.rope": "liger-kernel",
}
"""Module names to package names."""


def missing(module: str) -> str | None:
    """Return why the package of `module` cannot run here, or None if it can."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"{error}; pip install -e '.[bench]'"
    if module.startswith("liger") and not torch.cuda.is_available():
        return "its Triton kernels need a GPU, and there is none here"
    return None


def missing_peers(*modules: str) -> dict[str, str]:
    """Return the packages of `modules` that cannot run here, with the reason."""
    return {PEERS[module]: reason for module in modules if (reason := missing(module)) is not None}


def rotary_embedding(width: int, base: float = 10000.0) -> Callable[[Tensor], Tensor]:
    """Return rotary-embedding-torch's rotation of [B, H, L, D], which interleaves: another layout, the same work."""
    from rotary_embedding_torch import RotaryEmbedding

    return RotaryEmbedding(dim=width, theta=base).rotate_queries_or_keys


def liger_rope() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return liger-kernel's counterpart of transformers' `apply_rotary_pos_emb`."""
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    return liger_rotary_pos_emb


def x_transformers_alibi(heads: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return x-transformers' causal attention with its ALiBi, by PyTorch's fused attention; D = 64."""
    from x_transformers.x_transformers import AlibiPositionalBias

    bias = AlibiPositionalBias(heads)
    attend = _x_attend(heads)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias.bias = None  # otherwise it caches the first one; ours builds the bias in each call
        return attend(q, k, v, bias)

    return run


def x_transformers_t5(table: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return x-transformers' causal attention with its T5 bias, its `table` [buckets, H] given."""
    from x_transformers.x_transformers import RelativePositionBias

    buckets, heads = table.shape
    bias = RelativePositionBias(1.0, causal=True, num_buckets=buckets, max_distance=128, heads=heads)
    bias.relative_attention_bias.weight.data = table.detach()
    attend = _x_attend(heads)
    return lambda q, k, v: attend(q, k, v, bias)


def _x_attend(heads: int) -> Callable[..., Tensor]:
    from x_transformers.attend import Attend

    attend = Attend(causal=True, flash=True, heads=heads)
    return lambda q, k, v, bias: attend(q, k, v, attn_bias=bias(q.shape[2], k.shape[2]))[0]


def fire_dense(mechanism: Any) -> Callable[[int], Tensor]:
    """Return FIRE's bias [1, H, L, L] of a length, as its paper prints it: arXiv:2310.04418, appendix.

    Args:
        mechanism: whose weights it takes.
    """
    width, heads = len(mechanism.hidden_weight), len(mechanism.out_bias)
    network = torch.nn.Sequential(torch.nn.Linear(1, width), torch.nn.ReLU(), torch.nn.Linear(width, heads))
    network[0].weight.data, network[0].bias.data = mechanism.hidden_weight.data[:, None], mechanism.hidden_bias.data
    network[2].weight.data, network[2].bias.data = mechanism.out_weight.data, mechanism.out_bias.data
    c, threshold = mechanism.c.detach(), (mechanism.multiplier.detach() * mechanism.threshold).abs()

    def bias(length: int) -> Tensor:
        positions = torch.arange(length, dtype=torch.float)
        distance = torch.log(torch.abs(c * (positions[:, None] - positions[None])) + 1)
        normalizer = torch.log(torch.abs(c * torch.max(positions, threshold)[:, None]) + 1)
        return network((distance / (normalizer + 1e-6)).unsqueeze(-1)).unsqueeze(0).permute(0, 3, 1, 2)

    return bias


def transformers_t5(table: Tensor, scaling: float) -> Callable[..., Tensor]:
    """Return transformers' T5 decoder attention: a dense bias, passed to sdpa as `position_bias`.

    Releases whose T5 has no sdpa add it to the scores. The function takes q, k, v [1, H, L, D] and, for gradients, the
    table [buckets, H].
    """
    from transformers import T5Config
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.t5.modeling_t5 import T5Attention

    buckets, heads = table.shape
    config = T5Config(
        num_heads=heads, d_kv=8, d_model=8 * heads, relative_attention_num_buckets=buckets, is_decoder=True,
        relative_attention_max_distance=128,
    )  # fmt: skip
    has_sdpa = "is_causal" in inspect.signature(T5Attention.__init__).parameters
    module: Any = T5Attention(
        config, has_relative_attention_bias=True, layer_idx=0, **({"is_causal": True} if has_sdpa else {})
    ).eval()
    del module.relative_attention_bias

    def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor = table) -> Tensor:
        module.relative_attention_bias = lambda index: torch.nn.functional.embedding(index, table)
        bias = module.compute_bias(q.shape[2], k.shape[2], device=q.device)
        if not has_sdpa:
            future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
            scores = (q @ k.mT * scaling + bias).masked_fill(future, torch.finfo(q.dtype).min)
            return scores.softmax(dim=-1) @ v
        out, _ = sdpa_attention_forward(module, q, k, v, None, scaling=scaling, position_bias=bias, is_causal=True)
        return out.transpose(1, 2)

    return run
