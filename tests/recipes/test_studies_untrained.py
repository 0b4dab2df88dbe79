"""The study of swaps without training, on tiny models: its rows are what the public functions give, and it resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import hf_posswap
from hf_posswap.comparison import read_documents
from hf_posswap.evaluation import measure_losses, sliding_losses
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.utils.atomic_io import read_json, write_json
from recipes.studies import untrained
from recipes.studies.measuring import INTERVALS, intervals_said
from tests.training.engine_runs import write_model, write_texts

pytestmark = pytest.mark.slow

WINDOW = 64


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with tiny models of learned positions, of RoPE and of masked tokens, and texts."""
    folder = tmp_path_factory.mktemp("untrained")
    for kind in ("gpt2", "llama", "bert"):
        write_model(folder / kind, kind)
    write_texts(folder / "valid", count=9)
    write_texts(folder / "fit", count=3)
    return folder


def study(place: Path, base: str, code: int = 0) -> Any:
    """Run the study as its user does, and return its results, or what it says where it ends with an error."""
    given = {"base": base, "fit": "fit", "valid": "valid", "out": "out"}
    arguments = [part for name, value in given.items() for part in (f"--{name}", str(place / value))]
    found = CliRunner().invoke(untrained.app, [*arguments, "--work", str(place / "work")])
    assert found.exit_code == code, found.output
    return read_json(place / "out" / "untrained.json") if code == 0 else found.output


def by_hand(place: Path, windows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses of the Llama with linear scaling for so many windows, and those of its sliding window."""
    words = load_tokenizer(place / "llama", instead="")
    tokens = read_documents([place / "valid"], words, length=8 * WINDOW, limit=40).tokens
    model, length = hf_posswap.load(place / "llama").eval(), windows * WINDOW
    slid = sliding_losses(model, tokens[:, :length], WINDOW)
    hf_posswap.patch_model(model, "linear", factor=windows)
    return measure_losses(model, tokens[:, :length], [length], one_pass=True)[length], slid


def test_the_study_holds_every_start_against_the_sliding_window(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = study(place, "llama")
    (base,) = result["bases"]
    assert [(row["start"], row["windows"]) for row in base["rows"]] == [
        (start.name, windows) for start in untrained.STARTS["rope"] for windows in (2, 4, 8)
    ]
    row = next(row for row in base["rows"] if row["start"] == "linear" and row["windows"] == 4)
    read, slid = by_hand(place, 4)
    assert row["less_sliding"]["difference"] == pytest.approx(float(read.mean() - slid.mean()), abs=1e-5)
    assert base["sliding"]["4"] == pytest.approx(float(slid.mean()), abs=1e-5)
    kept = [row for row in base["rows"] if row["start"] == "as it is"]
    assert all(row["in_window"]["difference"] == 0.0 for row in kept)

    monkeypatch.setattr(untrained, "measure_losses", None)  # all of it was measured before
    monkeypatch.setattr(untrained, "sliding_losses", None)
    assert study(place, "llama") == result


def test_bases_stand_side_by_side_and_an_encoder_is_refused(place: Path) -> None:
    study(place, "llama")
    result = study(place, "gpt2")
    assert [(base["name"], base["kind"]) for base in result["bases"]] == [("llama", "rope"), ("gpt2", "learned")]
    rows = result["bases"][1]["rows"]
    assert {row["start"] for row in rows} == {start.name for start in untrained.STARTS["learned"]}
    assert all("less_sliding" in row for row in rows if row["start"].startswith(("alibi", "t5", "rope")))
    assert [base["intervals"] for base in result["bases"]] == [INTERVALS] * 2
    table = (place / "out" / "untrained.md").read_text(encoding="utf-8")
    assert table.count(intervals_said({"intervals": INTERVALS})) == 2
    assert all(f"| {start.name} |" in table for starts in untrained.STARTS.values() for start in starts)
    assert str(place) not in table
    assert "the study is of causal models with RoPE or a learned table" in study(place, "bert", code=3)


def test_a_base_that_was_measured_before_keeps_its_method_and_versions(tmp_path: Path) -> None:
    path = tmp_path / "untrained.json"
    block = {"name": "new", "intervals": INTERVALS, "versions": {"torch": "3"}}
    write_json(path, {"study": "untrained", "versions": {"torch": "2"}, "bases": [{"name": "old"}, {"name": "new"}]})
    result = untrained._with_base(path, block)
    assert result == {"study": "untrained", "bases": [{"name": "old", "versions": {"torch": "2"}}, block]}
    write_json(path, result)
    assert untrained._with_base(path, block) == result
    assert intervals_said({"intervals": "another"}) == "Intervals of 95 % over documents: another."
