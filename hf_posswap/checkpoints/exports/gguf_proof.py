"""Comparing a GGUF file, run by llama.cpp in a process of its own, with the model that it was made of."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_posswap.checkpoints.exports.mechanism import Stated
from hf_posswap.errors import SwapVerificationError
from hf_posswap.utils.atomic_io import scratch_folder

MOST = 512
"""Tokens that are compared, at most."""
BOUNDS = {"F32": 1e-3, "F16": 5e-2, "BF16": 4e-1}
"""How far log probabilities may be apart, in nats, by the coarsest number that llama.cpp computes with."""


def ran_alike(model: Any, path: Path, stated: Stated, coarsest: str) -> str:
    """Return in words how near llama.cpp's outputs are to those of `model`; that it is not installed, where it is not.

    Args:
        model: a causal language model.
        path: of the GGUF file made of it.
        stated: its mechanism.
        coarsest: F32, F16 or BF16: of the weights, or of GELU, which llama.cpp looks up in a table of F16.

    Raises:
        SwapVerificationError: it stops, or its outputs are others.
    """
    if find_spec("llama_cpp") is None:
        return "not compared: llama-cpp-python is not installed"
    count = min(stated.length, MOST)
    if stated.rope_type == "dynamic":  # plain rope there
        count = min(count, stated.original or stated.length)
    ids = torch.randint(0, model.config.vocab_size, (count,), generator=torch.Generator().manual_seed(0))
    found = run_llamacpp(path, ids, count)
    with torch.no_grad():
        logits = model.float().eval()(ids[None]).logits[0]  # [L, V]
    expected = logits.double().log_softmax(-1)
    apart = float((found.double().log_softmax(-1) - expected).abs().max())
    bound = BOUNDS[coarsest]
    if not apart <= bound:  # a NaN too
        raise SwapVerificationError(
            f"llama.cpp's log probabilities of {count} tokens are up to {apart:.2g} nats from the model's, more than "
            f"{bound:g}. Nothing was written; please report this."
        )
    return f"llama.cpp gives the model's log probabilities of {count} random tokens, to {apart:.1g} nats"


def run_llamacpp(path: Path, ids: torch.Tensor, context: int) -> torch.Tensor:
    """Return llama.cpp's logits [L, V] of `ids` [L], with a cache of `context` positions in float32.

    It runs in a process of its own: llama.cpp ends its process where a file is not to its liking. It rounds `context`
    up to a multiple of 256.

    Raises:
        SwapVerificationError: that process failed; the message has its last line.
    """
    with scratch_folder() as folder:
        tokens, logits = folder / "tokens.npy", folder / "logits.npy"
        np.save(tokens, ids.numpy())
        command = [sys.executable, str(Path(__file__).with_name("llamacpp_child.py")), path, tokens, logits, context]
        run = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
        if run.returncode or not logits.exists():
            said = (run.stderr.strip().splitlines() or ["nothing"])[-1]
            raise SwapVerificationError(f"llama.cpp cannot run {path.name} (exit {run.returncode}): {said}")
        return torch.from_numpy(np.load(logits))
