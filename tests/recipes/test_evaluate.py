"""The evaluation recipes, as their user runs them, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner, Result

import hf_posswap
from hf_posswap.training import byte_tokenizer
from recipes import compare, evaluate


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a byte-level GPT-2 of 16 positions, and write two texts beside it."""
    torch.manual_seed(0)
    shape = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    config = GPT2Config(vocab_size=257, **shape, bos_token_id=256, eos_token_id=256)
    folder = tmp_path_factory.mktemp("recipe") / "tiny"
    hf_posswap.save(GPT2LMHeadModel(config), folder, tokenizer=byte_tokenizer())
    for number in range(2):
        (folder.parent / f"{number}.txt").write_text(f"text {number} " * 20)
    return folder


def run(app: typer.Typer, *arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_evaluate_holds_a_swap_against_the_model(model: Path) -> None:
    out, text = model.parent / "evaluated", model.parent
    done = run(evaluate.app, model, "rope", out, "--text", text / "0.txt", "--text", text / "1.txt")
    assert done.exit_code == 0, done.output
    assert "| ◆ tiny+rope |" in done.output
    assert "Within the window: no verdict, KL " in done.output
    results = json.loads((out / "results.json").read_text())
    assert results["lengths"] == [16, 32, 64, 128]
    assert results["data"]["documents"] == 2
    assert (out / "perplexity-by-length.png").exists()


def test_compare_measures_every_scheme(model: Path) -> None:
    out, text = model.parent / "compared", model.parent
    more = ("--text", text / "0.txt", "--text", text / "1.txt", "--lengths", "16,32")
    done = run(compare.app, model, out, "rope", "alibi", *more)
    assert done.exit_code == 0, done.output
    assert list(json.loads((out / "results.json").read_text())["models"]) == ["tiny", "tiny+rope", "tiny+alibi"]


def test_an_error_is_one_line(model: Path) -> None:
    done = run(evaluate.app, model, "rope", model.parent / "none", "--text", model.parent / "absent.txt")
    assert done.exit_code == 4
    assert done.stderr.startswith(f"error: {model.parent / 'absent.txt'} does not exist; give text files")
    assert done.stderr.count("\n") == 1
    assert not (model.parent / "none").exists()
