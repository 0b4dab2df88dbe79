"""The study of needles: its texts can be solved from what stands in them, and its shares are those of passkey_grid."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import hf_posswap
from hf_posswap.evaluation import passkey_grid, wilson_interval
from hf_posswap.evaluation.passkey import FILLER, QUESTION, PasskeyTask
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.utils.atomic_io import read_json
from recipes.studies import puzzles, retrieval
from tests.training.engine_runs import write_model

DRAWS = 50


@pytest.mark.parametrize("filler", [0, puzzles.IN_A_WINDOW, 40])
def test_pairs_and_copies_are_answered_by_what_stands_before(filler: int) -> None:
    random = np.random.default_rng(0)
    for _ in range(DRAWS):
        first, *between, last = puzzles.pairs(random, filler).strip().split("\n")
        assert sorted(first.split(", ")) == sorted(last.split(", "))
        assert set("".join(between)) <= set(FILLER)
        first, *between, last = puzzles.copy(random, filler).strip().split("\n")
        assert first == last
        assert len(between) <= (filler > puzzles.IN_A_WINDOW)


@pytest.mark.parametrize("filler", [0, 7, 40])
def test_a_passkey_is_asked_for_once_and_stands_in_filler_of_every_length(filler: int) -> None:
    random, lengths = np.random.default_rng(0), set()
    for _ in range(20 * DRAWS):
        text = puzzles.passkey(random, filler)
        before, needle, key, after, answer = re.fullmatch(
            rf"(.*)(\nThe pass key is (\d+)\. Remember it\. \3 is the pass key\.\n)(.*){re.escape(QUESTION)} (\d+)",
            text,
        ).groups()  # type: ignore[union-attr]
        assert key == answer
        assert len(needle) > 0
        lengths.add((len(before) + len(after)) * 2 // len(FILLER))
    assert lengths == set(range(filler + 1))


def test_documents_follow_from_the_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        words = [str(tmp_path / name), "--documents", "30", "--seed", str(seed)]
        found = CliRunner().invoke(puzzles.app, words)
        assert found.exit_code == 0, found.output
    texts = {name: (tmp_path / name / "puzzles-0.jsonl").read_text() for name in "abc"}
    assert texts["a"] == texts["b"] != texts["c"]
    assert [json.loads(line)["text"] for line in texts["a"].splitlines()] == puzzles.documents(30, 7, 0)


def test_a_folder_of_other_files_is_refused_and_an_earlier_set_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    found = CliRunner().invoke(puzzles.app, [str(tmp_path), "--documents", "5"])
    assert found.exit_code != 0
    assert "holds notes.txt already" in " ".join(found.output.split())
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    for documents in (10_001, 5):
        found = CliRunner().invoke(puzzles.app, [str(tmp_path / "new"), "--documents", f"{documents}"])
        assert found.exit_code == 0, found.output
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["puzzles-0.jsonl"]
    assert len((tmp_path / "new" / "puzzles-0.jsonl").read_text().splitlines()) == 5


def test_the_interval_is_that_of_one_seeds_needles() -> None:
    low, high = wilson_interval(90, 100)
    assert retrieval._cell(270, 300, needles=100) == f"90% [{low:.0%}, {high:.0%}]"


def test_the_effective_length_ends_before_the_first_length_that_falls_below_the_bar() -> None:
    """By hand: of 100 needles 93 have a lower bound of 0.863, 91 one of 0.838; the bar of 100 % is 0.85."""
    base = {"recipe": "base", "state": "as it is", "found": {"0.5": [10, 100], "1": [100, 100], "2": [91, 100]}}
    trained = {"recipe": "yarn", "state": "trained", "found": {"1": [300, 300], "2": [279, 300], "4": [273, 300]}}
    assert retrieval.effective_tokens(base, base, 128) == 128
    assert retrieval.effective_tokens(trained, base, 128) == 256
    goals = list(retrieval.goals_of([base, trained], 128))
    assert [goal["reached"] for goal in goals] == [False, True, True]
    assert goals[2]["found"] == "256 tokens, 128 tokens before"


def test_a_model_that_finds_nothing_has_no_effective_length() -> None:
    row = {"recipe": "base", "state": "as it is", "found": {"1": [0, 100], "2": [0, 100]}}
    assert retrieval.effective_tokens(row, row, 128) is None


@pytest.mark.slow
def test_the_study_counts_needles_before_a_swap_after_it_and_after_training(tmp_path: Path) -> None:
    write_model(tmp_path / "base", "llama", max_position_embeddings=256)
    CliRunner().invoke(puzzles.app, [str(tmp_path / "far"), "--documents", "60", "--filler", "74"])
    given = {"base": "base", "train": "far", "out": "out", "work": "work"}
    words = [part for name, value in given.items() for part in (f"--{name}", str(tmp_path / value))]
    words += ["--tokens", "4200", "--trials", "1", "--seeds", "2"]

    def study() -> Any:
        found = CliRunner().invoke(retrieval.app, words)
        assert found.exit_code == 0, found.output
        return read_json(tmp_path / "out" / "retrieval.json")

    result = study()
    assert [(row["recipe"], row["state"]) for row in result["rows"]] == [
        ("base", "as it is"),
        *((name, state) for name in ("yarn", "abf") for state in ("before training", "trained")),
    ]
    model = hf_posswap.load(tmp_path / "base").eval()
    task = PasskeyTask(load_tokenizer(tmp_path / "base", instead=""), header=False)
    for multiple, (found, asked) in result["rows"][0]["found"].items():
        grid = passkey_grid(model, task, lengths=[round(256 * float(multiple))], depths=retrieval.DEPTHS, trials=1)
        assert [found, asked] == [sum(cell.exact for cell in grid), len(grid)]
    assert all(asked == 10 for _, asked in result["rows"][2]["found"].values())  # of two seeds
    assert [goal["reached"] for goal in result["goals"]] == [False] * 5  # it has learned nothing
    runs = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("report.json")}
    assert len(runs) == 4
    assert study() == result
    assert runs == {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("report.json")}
    page = (tmp_path / "out" / "retrieval.md").read_text()
    assert "python -m recipes.studies.retrieval --base $BASE --train $TEXT/far --tokens 4200 " in page
    assert "| base | finds them in its window | 0.0% | missed |" in page
    assert (tmp_path / "out" / "retrieval.png").read_bytes().startswith(b"\x89PNG")


def test_a_base_whose_window_holds_no_passkey_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "base", "llama", max_position_embeddings=64)
    words = ["--base", str(tmp_path / "base"), "--train", "python", "--tokens", "9999", "--out", str(tmp_path / "out")]
    found = CliRunner().invoke(retrieval.app, [*words, "--work", str(tmp_path / "work")])
    assert found.exit_code != 0
    assert re.search(r"a passkey takes \d+ tokens here, and the window of .* has 64", " ".join(found.output.split()))


def test_fewer_tokens_than_a_window_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "base", "llama", max_position_embeddings=256)
    words = ["--base", str(tmp_path / "base"), "--train", "python", "--tokens", "100", "--out", str(tmp_path / "out")]
    found = CliRunner().invoke(retrieval.app, [*words, "--work", str(tmp_path / "work")])
    assert found.exit_code != 0
    assert "100 tokens are less than one window of 2048" in " ".join(found.output.split())
