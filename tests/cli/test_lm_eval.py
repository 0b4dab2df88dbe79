"""`posswap lm-eval`, on a task of our own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_posswap.training import byte_tokenizer
from tests.cli.conftest import Posswap
from tests.cli.letters import letters

pytestmark = pytest.mark.slow

pytest.importorskip("lm_eval", reason="lm_eval is not installed: the harness is not tested")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "bytes"
    size = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 257, "n_positions": 32}
    GPT2LMHeadModel(GPT2Config(**size, bos_token_id=256, eos_token_id=256)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a task of four choices between letters."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "letters.yaml").write_text(json.dumps(letters(folder)))
    return folder / "letters.yaml"


def test_a_swap_is_put_in_and_the_scores_are_shown_and_kept(
    posswap: Posswap, model: Path, task: Path, tmp_path: Path
) -> None:
    out = tmp_path / "found.json"
    run = posswap("lm-eval", model, "rope", "--max-length", "96", "--tasks", task, "--limit", "3", "-o", out, "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found == json.loads(out.read_text())
    assert (found["longest_input"], found["n-samples"]["letters"]["effective"]) == (96, 3)
    assert "did not load" not in run.stderr
    assert "Passed an already-initialized model" not in run.stderr
    shown = posswap("lm-eval", model, "--tasks", task, "--device", "cpu")
    assert shown.returncode == 0, shown.stderr
    assert "letters" in shown.stdout
    assert "acc" in shown.stdout
    assert "Inputs of at most 32 tokens." in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "no.yaml"], "no such file of a task: no.yaml"),
        (["--tasks", ","], "tasks names what to run, got none"),
        (["--tasks", "no.yaml", "--max-length", "64"], "name one after MODEL"),
        (["rope:size=3", "--tasks", "no.yaml"], "scheme 'rope' has no field 'size'"),
        (["--tasks", "no.yaml", "--limit", "0"], "limit is a whole number of at least 1, got 0"),
    ],
)
def test_a_wrong_command_line_is_said_in_a_line(
    posswap: Posswap, model: Path, arguments: list[str], message: str
) -> None:
    run = posswap("lm-eval", model, *arguments)
    assert run.returncode == 2
    assert message in run.stderr
    assert run.stderr.count("\n") == 1
