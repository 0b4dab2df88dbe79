"""`posswap compare` on what trainings wrote: names, the control, the sliding window, and nothing of the machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hf_posswap
from hf_posswap.cli import app
from hf_posswap.training import byte_tokenizer
from tests.cli.conftest import Posswap, says
from tests.comparison.test_names import TEXTS, gpt2


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two runs, as trainings leave them, and texts."""
    home = tmp_path_factory.mktemp("runs") / "home-of-a-user"
    for number, name in enumerate(("control", "rope")):
        model = gpt2(number)
        if name == "rope":
            hf_posswap.patch_model(model, "rope", max_length=64)
        hf_posswap.save(model, home / name / "model", tokenizer=byte_tokenizer())
    (home / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (home / "texts" / f"{number}.txt").write_text(text)
    return home


@pytest.mark.slow
def test_nothing_that_is_written_holds_an_absolute_path(posswap: Posswap, runs: Path) -> None:
    home = runs
    done = posswap(
        "compare", f"base={home / 'control' / 'model'}", home / "control" / "model", home / "rope" / "model",
        "--text", home / "texts", "--lengths", "16,64", "--metrics", "ppl_prefix,ctx_gain", "-o", home / "out",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = [
        path for path in (home / "out").rglob("*") if path.suffix in (".json", ".csv", ".md", ".tex", ".html", ".svg")
    ]
    assert len(written) >= 7
    for path in written:
        assert home.name not in path.read_text(), path.name
    results = json.loads((home / "out" / "results.json").read_text())
    assert list(results["models"]) == ["base", "control", "rope"]
    assert results["base"] == "control"
    assert results["made"]["command"].startswith("posswap compare base=model model model --text texts")
    assert "| ┄ control, sliding window |" in done.stdout
    assert "- rope: Far context" in done.stdout
    assert "the sliding window of control (" in done.stdout


def test_two_models_of_one_name_are_told_at_once_with_what_to_do(runs: Path) -> None:
    done = CliRunner().invoke(app, ["compare", str(runs / "rope" / "model"), str(runs / "rope" / "model")])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert "got ['rope', 'rope']: name each of them, NAME=MODEL on the command line" in done.stderr


def test_help_shows_how_trainings_are_compared() -> None:
    text = CliRunner().invoke(app, ["compare", "--help"], env={"COLUMNS": "200"}).stdout
    assert says(text, "posswap compare base=gpt2 control/model rope/model --baseline control --text books/ -o results")
    assert "--baseline" in text
