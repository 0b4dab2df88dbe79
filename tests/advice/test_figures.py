"""The figures in the package are those of the studies, each with its file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_posswap.inspection.advice.figures import Figure, figures_of, load_figures
from recipes.studies import figures

ROOT = Path(__file__).resolve().parents[2]


def results(name: str) -> Any:
    return json.loads((ROOT / "recipes" / "studies" / "results" / name).read_text(encoding="utf-8"))


def test_the_package_has_the_figures_of_the_results() -> None:
    assert tuple(figures.collect()) == load_figures(), "run python -m recipes.studies.figures"
    assert CliRunner().invoke(figures.app, ["--check"]).exit_code == 0


def test_other_figures_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "figures.json"
    old.write_text(json.dumps({"figures": [figure.to_dict() for figure in load_figures()[1:]]}))
    monkeypatch.setattr(figures, "PACKAGED", old)
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "collect", lambda: list(load_figures()))
    found = CliRunner().invoke(figures.app, ["--check"])
    assert found.exit_code == 4
    assert "does not match the results" in found.output


def test_every_figure_names_a_file_of_the_repository() -> None:
    assert load_figures()
    for figure in load_figures():
        assert (ROOT / figure.source).is_file()
        assert Figure.from_dict(json.loads(json.dumps(figure.to_dict()))) == figure


def test_a_figure_of_the_adaptation_is_what_the_study_wrote() -> None:
    (row,) = (row for row in results("adaptation.json")["rows"] if row["recipe"] == "learned-to-rope")
    (made,) = (one for one in figures_of("learned-to-rope", "sliding window", trained=True) if one.whose == "base's")
    found = row["from_sliding_base"]
    assert (made.difference, made.low, made.high) == (found["difference"], found["low"], found["high"])
    assert made.tokens == 417_792
    assert made.base.parameters == 3_749_376


def test_the_quickstarts_figures_are_those_of_its_page() -> None:
    page = (ROOT / "recipes/studies/results/quickstart.md").read_text(encoding="utf-8")
    made = [figure for figure in load_figures() if figure.source.endswith("quickstart.md")]
    assert {figure.subject for figure in made} == {"learned-to-rope", "to-alibi"}
    for figure in made:
        assert re.search(rf"\| {re.escape(f'{figure.difference:+.3f}')} \([-+.\d]+ %\) at 1024 \|", page)
        interval = f"95 % interval {figure.low:+.3f} to {figure.high:+.3f}"
        assert f"({figure.difference:+.3f} nats per token, {interval}" in page
        assert figure.tokens == 200 * 2048
        assert figure.base.window * figure.windows == 1024


def test_without_training_every_row_that_was_not_refused_is_a_figure() -> None:
    for block in results("untrained.json")["bases"]:
        rows = [row for row in block["rows"] if "refused" not in row]
        assert rows
        for row in rows:
            made = [
                figure
                for figure in figures_of(row["start"], "sliding window", kind=block["kind"], trained=False)
                if figure.windows == row["windows"] and figure.base.name == block["name"]
            ]
            assert [figure.difference for figure in made] == [row["less_sliding"]["difference"]]


def test_a_figure_says_all_that_it_rests_on() -> None:
    (made,) = (one for one in figures_of("learned-to-rope", "sliding window", trained=True) if one.whose == "base's")
    assert str(made) == (
        "learned-to-rope, after 417,792 tokens: -0.016 nats a token (-0.019 to -0.013), 8 windows read at once, minus "
        "the base's sliding window over the same tokens, on gpt2-books-256 (learned, 3.7 M parameters, window 256), 16 "
        "documents"
    )
