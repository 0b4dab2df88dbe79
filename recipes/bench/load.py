"""Startup cost: importing the package, swapping a 7B model, and the proof before a swap on an untested version."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_posswap import patch_model, unpatch_model, versions
from hf_posswap.errors import UntestedVersionWarning
from hf_posswap.patching.apply import version_guard
from hf_posswap.testing.tiny import tiny_model
from recipes.bench.harness import Case

ROOT = Path(__file__).resolve().parents[2]
PROVED = {
    "GPT2LMHeadModel": "rope",
    "LlamaForCausalLM": "alibi",
    "BertForMaskedLM": "rope",
    "Gemma3ForCausalLM": "alibi",
    "T5ForConditionalGeneration": "rope",
}
"""Classes whose swaps are proved, and to which scheme."""


def cases(smoke: bool) -> Iterator[Case]:
    """Yield imports in fresh processes, swaps of a Llama without weights, and proofs of swaps."""
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
    with _untested_versions():
        for name, scheme in PROVED.items():
            ways = {"ours": _proof(tiny_model(name, meta=False), scheme)}
            yield Case(f"proof of {scheme} in {name}", ways, seconds=0.16)


def _importing(code: str) -> Callable[[], None]:
    def run() -> None:
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

    return run


def _swap(model: Any, scheme: str, options: dict[str, Any]) -> Callable[[], None]:
    def run() -> None:
        patch_model(model, scheme, **options)
        unpatch_model(model)

    return run


@contextmanager
def _untested_versions() -> Iterator[None]:
    """Treat the installed versions as untested, and remember no verdict in a folder."""
    keep = {name: os.environ.pop(name, None) for name in ("HF_POSSWAP_CACHE", version_guard.SETTING)}
    versions.state_tested({"transformers": ["5.0.0"], "torch": ["2.0.0"]})
    os.environ["HF_POSSWAP_CACHE"] = str(Path(__file__) / "no folder")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UntestedVersionWarning)
            yield
    finally:
        versions.state_tested({})
        del os.environ["HF_POSSWAP_CACHE"]
        os.environ.update({name: value for name, value in keep.items() if value is not None})


def _proof(model: Any, scheme: str) -> Callable[[], None]:
    swap = _swap(model, scheme, {})

    def run() -> None:
        version_guard._verdicts.clear()
        swap()

    return run
