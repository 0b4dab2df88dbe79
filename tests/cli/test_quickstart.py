"""`posswap quickstart`: a whole run in its own process, its errors, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from hf_posswap.cli import app
from hf_posswap.training import byte_tokenizer
from tests.cli.conftest import ROOT, Posswap


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small untrained GPT-2 of bytes, with 64 positions and a tokenizer."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    size = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 64}
    folder = tmp_path_factory.mktemp("small")
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, **size)).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_the_command_writes_results_and_a_report(posswap: Posswap, small: Path, tmp_path: Path) -> None:
    run = posswap(
        "quickstart",
        "--model",
        small,
        "--schemes",
        "rope",
        "--steps",
        "2",
        "--out",
        tmp_path / "out",
        "--device",
        "cpu",
    )
    assert run.returncode == 0, run.stderr
    assert "rope: posswap train learned-to-rope" in run.stdout
    assert "posswap push" in run.stdout
    settings = json.loads((tmp_path / "out" / "quickstart.json").read_text())["settings"]
    assert (settings["steps"], settings["model"]) == (2, str(small))
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(results["models"]) == ["base", "control", "rope"]
    assert results["made"]["command"].startswith("posswap quickstart --model")
    assert (tmp_path / "out" / "report.html").is_file()


@pytest.mark.slow
def test_ctrl_c_ends_with_130_and_says_how_to_go_on(small: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hf_posswap", "quickstart", "--model", str(small), "--steps", "100000"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    assert process.stdout is not None
    while line := process.stdout.readline():
        if line.startswith("control: first loss"):
            break
    time.sleep(1)  # into the training that follows
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "the same command resumes from here" in " ".join(out.split())
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--steps", "0"], 2, "steps is a whole number of at least 1, got 0."),
        (["--seed", "-1"], 2, "seed is a whole number of at least 0, got -1."),
        (["--device", "abacus"], 2, "device 'abacus' cannot be used here"),
        (["--model", "/no/such/model"], 4, "'/no/such/model' does not exist"),
        (["--model", ""], 4, "'' does not exist"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, arguments: list[str], code: int, text: str) -> None:
    result = CliRunner().invoke(app, ["quickstart", "--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code == code
    assert text in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_unwritable_out_is_one_line(posswap: Posswap, small: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = posswap("quickstart", "--model", small, "--out", tmp_path / "file")
    assert run.returncode == 4
    assert run.stderr.startswith("error: ")
    assert run.stderr.count("\n") == 1
