"""Compare a GGUF file, which llama.cpp runs in a separate process, with its model."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_posswap.checkpoints.exports.mechanism import PositionConfig
from hf_posswap.errors import SwapVerificationError
from hf_posswap.utils.atomic_io import scratch_folder

MOST = 512
"""Tokens that are compared, at most."""
BOUNDS = {"F32": 1e-3, "F16": 5e-2, "BF16": 4e-1, "Q8_0": 1.2e-1}
"""How far log probabilities may be apart, in nats, by the coarsest number that llama.cpp computes with: at most, and
for Q8_0 on average. With weights of 8 bits it rounds activations to 8 bits as well, and single tokens are far apart."""


def ran_alike(model: Any, path: Path, position_config: PositionConfig, coarsest: str) -> str:
    """Return a sentence on how near llama.cpp's outputs are to those of `model`, or that it is not installed.

    Args:
        model: a causal language model.
        path: of its GGUF file.
        position_config: its mechanism.
        coarsest: F32, F16, BF16 or Q8_0: of the weights, or of GELU, which llama.cpp looks up in a table of F16.

    Raises:
        SwapVerificationError: llama.cpp fails, or its outputs differ.
    """
    if find_spec("llama_cpp") is None:
        return "not compared: llama-cpp-python is not installed"
    count = min(position_config.length, MOST)
    if position_config.rope_type == "dynamic":  # plain rope there
        count = min(count, position_config.original or position_config.length)
    ids = torch.randint(0, model.config.vocab_size, (count,), generator=torch.Generator().manual_seed(0))
    logits_of_file = run_llamacpp(path, ids, count)
    with torch.no_grad():
        logits = model.float().eval()(ids[None]).logits[0]  # [L, V]
    expected = logits.double().log_softmax(-1)
    differences = (logits_of_file.double().log_softmax(-1) - expected).abs()
    average = coarsest == "Q8_0"
    apart, bound = float(differences.mean() if average else differences.max()), BOUNDS[coarsest]
    if not apart <= bound:  # a NaN too
        raise SwapVerificationError(
            f"llama.cpp's log probabilities of {count} tokens are {'on average' if average else 'up to'} {apart:.2g} "
            f"nats from the model's, more than {bound:g}. Nothing was written; please report this."
        )
    qualifier = " on average (it rounds activations to 8 bits, too)" if average else ""
    return f"llama.cpp gives the model's log probabilities of {count} random tokens, to {apart:.1g} nats{qualifier}"


def run_llamacpp(path: Path, ids: torch.Tensor, context: int) -> torch.Tensor:
    """Return llama.cpp's logits [L, V] of `ids` [L], with a cache of `context` positions in float32.

    It runs in a separate process, because llama.cpp exits on a file that it refuses. It rounds `context` up to a
    multiple of 256.

    Raises:
        SwapVerificationError: that process failed; the message has its last line.
    """
    with scratch_folder() as folder:
        tokens, logits = folder / "tokens.npy", folder / "logits.npy"
        np.save(tokens, ids.numpy())
        command = [sys.executable, str(Path(__file__).with_name("llamacpp_child.py")), path, tokens, logits, context]
        run = subprocess.run([str(argument) for argument in command], capture_output=True, text=True, check=False)
        if run.returncode or not logits.exists():
            last_line = (run.stderr.strip().splitlines() or ["nothing"])[-1]
            raise SwapVerificationError(f"llama.cpp cannot run {path.name} (exit {run.returncode}): {last_line}")
        return torch.from_numpy(np.load(logits))
