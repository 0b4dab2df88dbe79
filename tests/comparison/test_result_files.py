"""What lies beside results.json says the same numbers; their origin is told, and no path of anyone's machine."""

from __future__ import annotations

import csv
import json
import platform
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_posswap
from hf_posswap.cli.evaluating import command_line
from hf_posswap.comparison import Candidate, EvalSettings, compare
from hf_posswap.comparison.results import date_now
from hf_posswap.comparison.tables import latex
from hf_posswap.training import byte_tokenizer
from tests.comparison.test_names import TEXTS, gpt2

SETTINGS = EvalSettings(lengths=(16, 32, 64), metrics=("ppl_prefix", "ctx_gain", "short_reg", "passkey"))


def run(folder: Path, **more: Any) -> dict[str, Any]:
    candidates = [Candidate(gpt2(), name="base"), Candidate(gpt2(), "rope", name="50% of $1_#&{x}~^\\|<rope>")]
    return compare(
        candidates, documents=TEXTS, tokenizer=byte_tokenizer(), settings=SETTINGS, out=folder, pictures=False, **more
    ).results


def test_the_wide_csv_holds_a_model_a_line_and_every_number_of_the_results(tmp_path: Path) -> None:
    results = run(tmp_path)
    with (tmp_path / "results.csv").open(newline="") as file:
        base, rope, sliding = csv.DictReader(file)
    assert [row["model"] for row in (base, rope, sliding)] == [*results["models"], results["sliding"]["name"]]
    for row, found in ((base, results["models"]["base"]), (rope, results["models"][rope["model"]])):
        for score in found["ppl_prefix"]:
            assert float(row[f"perplexity_{score['length']}"]) == score["perplexity"]
            assert float(row[f"perplexity_{score['length']}_low"]) == score["low"]
    assert base["perplexity_64"] == base["far_context_gain"] == ""  # it ends before
    assert sliding["perplexity_16"] == ""
    swapped = results["models"][rope["model"]]
    assert float(rope["far_context_gain"]) == swapped["far_context"]["gain"]
    assert rope["far_context_verdict"] == swapped["far_context"]["verdict"]
    assert float(rope["against_sliding_64"]) == swapped["against_sliding"][0]["difference"]
    against = results["comparisons"][rope["model"]]["lengths"]
    assert [float(rope[f"against_base_{r['length']}_p"]) for r in against] == [r["p_holm"] for r in against]
    assert float(rope["within_window"]) == swapped["short_reg"]["loss"]["difference"]


def test_the_latex_table_is_whole_and_nothing_in_it_is_a_command_by_accident(tmp_path: Path) -> None:
    results = run(tmp_path)
    text = (tmp_path / "table.tex").read_text()
    assert text == latex(results)
    lines = [line for line in text.splitlines() if not line.startswith("%")]
    assert lines[0].startswith(r"\begin{tabular}{l")
    columns = lines[0].count("r", len(r"\begin{tabular}{l"))
    rows = [line for line in lines if line.endswith(r" \\")]
    assert len(rows) == 1 + 3
    assert {len(re.split(r"(?<!\\)&", row)) for row in rows} == {1 + columns}
    name = r"50\% of \$1\_\#\&\{x\}\textasciitilde{}\textasciicircum{}\textbackslash{}\textbar{}"
    name += r"\textless{}rope\textgreater{}"
    assert rows[2].startswith(f"{name} & ")
    assert text.isascii()
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1


def test_results_hold_versions_hardware_command_and_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = run(tmp_path, command="posswap compare a b")
    wanted = {
        "hf_posswap": hf_posswap.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    assert wanted.items() <= results["environment"].items()
    assert results["environment"]["processor"]
    assert results["environment"]["cores"] >= 1
    assert results["made"]["command"] == "posswap compare a b"
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", results["made"]["date"])
    page = (tmp_path / "report.html").read_text()
    for said in (f"hf_posswap {hf_posswap.__version__}", "posswap compare a b", results["made"]["date"]):
        assert said in page.split('id="method"')[1]
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    assert date_now() == "1970-01-01T00:00:00Z"


def test_the_date_is_of_the_first_time_that_the_same_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, command, wanted in (
        ("0", "a", "1970-01-01"),
        ("86400", "a", "1970-01-01"),
        ("86400", "b", "1970-01-02"),
    ):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", seconds)
        assert run(tmp_path, command=command)["made"]["date"].startswith(wanted)
    (tmp_path / "results.json").write_text("[]")  # whatever lies there is written over
    run(tmp_path)
    assert json.loads((tmp_path / "results.json").read_text())["schema"] == 2


def test_a_command_names_no_folder_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = [
        str(tmp_path / "runs" / "rope"),
        "base=/place/of/me/gpt2",
        "/place/of/me/x+yarn:factor=4",
        "-o",
        "out dir",
        "~/b",
    ]
    monkeypatch.setattr("sys.argv", ["/bin/posswap", "compare", *given])
    assert command_line() == "posswap compare runs/rope base=gpt2 x+yarn:factor=4 -o 'out dir' b"
