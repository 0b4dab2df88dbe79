"""Rotating queries and keys, compared with transformers, another package and a plain copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_posswap import rope_math as rotary
from hf_posswap.rope_math import CosSin, Frequencies, cos_sin, default_inv_freq, rotate
from recipes.bench import peers
from recipes.bench.harness import Case, attention_inputs


def cases(smoke: bool) -> Iterator[Case]:
    """Yield contiguous tensors, and views of a fused projection as in GPT-2."""
    for length in (64,) if smoke else (1024, 8192):
        q, k, _ = attention_inputs(length)
        fused = torch.randn(1, length, 3, 12, 64)
        views = fused[:, :, 0].transpose(1, 2), fused[:, :, 1].transpose(1, 2)
        yield _case(f"RoPE, {length} tokens", q.contiguous(), k.contiguous())
        yield _case(f"RoPE, {length} tokens, views", *views)
        if not smoke:  # it takes seconds to build
            yield _compiled(f"RoPE, {length} tokens", q.contiguous(), k.contiguous())
            yield _compiled(f"RoPE, {length} tokens, views", *views)


def _compiled(name: str, q: torch.Tensor, k: torch.Tensor) -> Case:
    """Return the case of the compiled kernel, which is an option: `compile_rotation`."""
    table = _table(q)
    rotary.compile_rotation()
    kernel = rotary._compiled
    rotary.compile_rotation(False)
    assert kernel is not None
    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: (kernel(q, *table, "half"), kernel(k, *table, "half")),
        "not compiled": lambda: (rotate(q, table, "half"), rotate(k, table, "half")),
        "copy": lambda: (q.clone(), k.clone()),
    }
    goals = {"copy": 1.25} if q.shape[2] >= 8192 else {}
    return Case(f"{name}, compiled", ways, goals, tolerance=1e-6, unlike=frozenset({"copy"}))


def _table(q: torch.Tensor) -> CosSin:
    length, width = q.shape[2], q.shape[3]
    return cos_sin(torch.arange(length)[None], Frequencies(default_inv_freq(10000.0, width)))


def _case(name: str, q: torch.Tensor, k: torch.Tensor) -> Case:
    table = _table(q)
    cos, sin = (torch.cat((half[:, 0], half[:, 0]), dim=-1) for half in table)
    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: (rotate(q, table, "half"), rotate(k, table, "half")),
        "transformers": lambda: apply_rotary_pos_emb(q, k, cos, sin),
        "copy": lambda: (q.clone(), k.clone()),
    }
    unlike = {"copy", "rotary-embedding-torch"}
    if peers.missing("rotary_embedding_torch") is None:
        peer_rotation = peers.rotary_embedding(q.shape[3])
        ways["rotary-embedding-torch"] = lambda: (peer_rotation(q), peer_rotation(k))
    missing = peers.missing_peers("rotary_embedding_torch", "liger_kernel.ops.rope")
    return Case(name, ways, {"transformers": 0.75}, tolerance=0.0, unlike=frozenset(unlike), missing=missing)
