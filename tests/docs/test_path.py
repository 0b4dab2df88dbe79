"""The path of recipes.md, from a model to what is pushed, run as printed: on a tiny GPT-2 and with fewer steps."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

import hf_posswap
from hf_posswap.text.stdlib import python_corpus
from hf_posswap.training import byte_tokenizer
from tests.docs.pages import blocks
from tests.docs.place import environment

(PATH,) = (block.code for block in blocks("path"))
STEPS = "training.max_steps=1000"
WINDOW = 1024


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a folder with the model and the texts that the path names."""
    set_seed(0)
    words = byte_tokenizer()
    small = {"vocab_size": len(words), "bos_token_id": 256, "eos_token_id": 256}
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=WINDOW, **small))
    hf_posswap.save(model, tmp_path / "my-gpt2", tokenizer=words)
    texts = [document.text for document in python_corpus().train if len(document.text) > 9 * WINDOW]
    for folder, some in {"books": texts[:24], "other-books": texts[24:33]}.items():
        (tmp_path / folder).mkdir()
        for number, text in enumerate(some):
            (tmp_path / folder / f"{number}.txt").write_text(text[: 9 * WINDOW], encoding="utf-8")
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_from_a_model_to_what_is_pushed(place: Path) -> None:
    assert PATH.count(STEPS) == 1
    command = PATH.replace(STEPS, "training.max_steps=2 training.warmup_steps=1")
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], cwd=place, env=environment(place), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    plan = hf_posswap.swap_plan(hf_posswap.load(place / "rope" / "model"))
    assert (plan.scheme.name, plan.max_length) == ("rope", 8 * WINDOW)
    assert str(plan) in run.stdout
    results = json.loads((place / "results" / "results.json").read_text())
    assert list(results["models"]) == ["base", "control", "rope"]
    assert [row["length"] for row in results["models"]["rope"]["ppl_prefix"]][-1] == 8 * WINDOW
    assert "README.md" in run.stdout  # the card is among what would be pushed
    assert "learned-to-rope" in run.stdout
    report = json.loads((place / "rope" / "report.json").read_text())
    assert (
        report["phases"][0]["tokens"]
        == json.loads((place / "control" / "report.json").read_text())["phases"][0]["tokens"]
    )
    weights = [hf_posswap.load(place / name / "model").transformer.wte.weight for name in ("rope", "control")]
    assert not torch.equal(*weights)
