"""Startup cost: importing the package, and swapping a 7B model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_posswap import patch_model, unpatch_model
from recipes.bench.harness import Case

ROOT = Path(__file__).resolve().parents[2]


def cases(smoke: bool) -> Iterator[Case]:
    """Yield imports in fresh processes, and swaps of a Llama without weights."""
    if not smoke:
        bare = "import transformers"
        ways = {"ours": _importing(f"{bare}, hf_posswap"), bare: _importing(bare)}
        yield Case("import hf_posswap", ways, {bare: 1.1}, tolerance=None)
    config = LlamaConfig(num_hidden_layers=2) if smoke else LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    for scheme, options in (("yarn", {"factor": 4.0}), ("alibi", {}), ("t5", {})):
        yield Case(f"patch_model and unpatch_model, {scheme}", {"ours": _swap(model, scheme, options)}, seconds=1.0)


def _importing(code: str) -> Callable[[], None]:
    def run() -> None:
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

    return run


def _swap(model: Any, scheme: str, options: dict[str, Any]) -> Callable[[], None]:
    def run() -> None:
        patch_model(model, scheme, **options)
        unpatch_model(model)

    return run
