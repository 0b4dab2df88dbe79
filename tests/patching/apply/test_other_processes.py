"""A swapped model that was pickled runs in a process that has patched none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hf_posswap import patch_model
from hf_posswap.testing.tiny import tiny_model

CODE = """
import sys, torch
held = torch.load(sys.argv[1], weights_only=False)
model: object = held["model"]
with torch.no_grad():
    assert torch.equal(model(held["ids"]).logits, held["logits"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "scheme"), [("LlamaForCausalLM", "alibi"), ("GPT2LMHeadModel", "rope"), ("BertForMaskedLM", "rope")]
)
def test_a_fresh_process_runs_what_was_pickled(kind: str, scheme: str, tmp_path: Path) -> None:
    model: PreTrainedModel = patch_model(tiny_model(kind, meta=False), scheme)
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        torch.save({"model": model, "ids": ids, "logits": model(ids).logits}, tmp_path / "model.pt")
    command = [sys.executable, "-W", "ignore", "-c", CODE, str(tmp_path / "model.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
