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


def test_tasks_are_shown_by_length_with_what_is_kept_of_the_base(posswap: Posswap, model: Path, tmp_path: Path) -> None:
    task = letters(tmp_path)
    rows = [json.dumps({"text": "ab" * half, "answer": half % 2}) for half in (3, 4, 7, 8, 15, 16)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "letters.yaml").write_text(json.dumps(task))
    out, options = tmp_path / "base.json", ["--tasks", tmp_path / "letters.yaml", "--lengths", "8,16,32"]
    alone = posswap("lm-eval", model, *options, "--limit", "2", "-o", out, "--json")
    assert alone.returncode == 0, alone.stderr
    table = json.loads(alone.stdout)["table"]
    assert table["columns"] == ["8", "16", "32"]
    assert [cell["questions"] for cell in table["rows"][0]["values"].values()] == [2, 2, 2]
    swapped = posswap("lm-eval", model, "rope", *options, "--limit", "2", "--base", out)
    assert swapped.returncode == 0, swapped.stderr
    for shown in ("kept)", "RULER", "NoLiMa", "Inputs of at most 32 tokens.", "The base reads at most 32 tokens."):
        assert shown in " ".join(swapped.stdout.split()), swapped.stdout
    other = posswap("lm-eval", model, "rope", *options, "--base", out)
    assert other.returncode != 0
    assert "answered different questions" in other.stderr


def test_the_table_says_how_far_a_model_reaches() -> None:
    from hf_posswap.cli.lm_eval import length_table

    def row(scores: list[float], ruler: int | None, nolima: int | None) -> dict[str, object]:
        cells = {str(n): {"score": score} for n, score in zip((8, 16), scores, strict=True)}
        reached = {"ruler": ruler, "nolima": nolima}
        return {"task": "a", "metric": "acc", "values": cells, "effective_length": reached, "retention": {"8": 50.0}}

    rows = [row([0.9, 0.1], 8, 8), row([1.0, 0.9], 16, 16), row([0.0, 0.0], None, None)]
    header, shown = length_table({"rows": rows}, [8, 16])
    assert header == ["task", "metric", "8", "16", "RULER length", "NoLiMa length"]
    assert [cells[2:] for cells in shown] == [
        ["0.9 (50 % kept)", "0.1", "8", "8"],
        ["1 (50 % kept)", "0.9", "≥ 16", "≥ 16"],
        ["0 (50 % kept)", "0", "< 8", "–"],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "no.yaml"], "no such file of a task: no.yaml"),
        (["--tasks", ","], "tasks names what to run, got none"),
        (["--tasks", "no.yaml", "--max-length", "64"], "name one after MODEL"),
        (["rope:size=3", "--tasks", "no.yaml"], "scheme 'rope' has no field 'size'"),
        (["--tasks", "no.yaml", "--lengths", "many"], "--lengths are whole numbers with commas"),
        (["--tasks", "no.yaml", "--metadata", "[1]"], "--metadata [1]: expected a JSON object"),
        (["--tasks", "no.yaml", "--fewshot-as-multiturn"], "fewshot_as_multiturn needs a chat"),
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
