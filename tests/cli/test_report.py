"""`posswap report`: the page again from results.json, and what it says where that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from hf_posswap.comparison import EvalSettings, evaluate
from hf_posswap.training import byte_tokenizer
from tests.cli.conftest import Posswap, says

TEXTS = [f"{number} " * 60 for number in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an evaluation of a tiny model with and without rotation."""
    config = GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=257, n_positions=32, bos_token_id=256, eos_token_id=256
    )
    settings = EvalSettings(lengths=(32, 64), metrics=("ppl_prefix", "nll_pos", "short_reg"))
    out = tmp_path_factory.mktemp("results")
    model = GPT2LMHeadModel(config)
    evaluate(model, "rope", documents=TEXTS, tokenizer=byte_tokenizer(), settings=settings, out=out, pictures=False)
    return out


def test_the_page_comes_out_as_it_was(posswap: Posswap, folder: Path) -> None:
    page = folder / "report.html"
    written = page.read_text(encoding="utf-8")
    page.unlink()
    run = posswap("report", folder)
    assert (run.returncode, run.stderr) == (0, "")
    assert says(run.stdout, f"The page is {page}.")
    assert page.read_text(encoding="utf-8") == written


def test_the_page_goes_where_it_is_asked_to(posswap: Posswap, folder: Path, tmp_path: Path) -> None:
    run = posswap("report", folder / "results.json", "-o", tmp_path / "new" / "page.html")
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "new" / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def run_of(scores: list[float], limit: int | None = None) -> str:
    """Return what `posswap lm-eval --out` writes for one task at two lengths."""
    values = {
        str(length): {"score": score, "stderr": None, "questions": 4}
        for length, score in zip((32, 64), scores, strict=True)
    }
    effective = {"ruler": 32 if scores[0] > 0.9 else None, "nolima": 64}
    row = {"task": "needle", "metric": "acc", "higher_is_better": True, "values": values}
    table = {"columns": ["32", "64"], "rows": [row | {"effective_length": effective}]}
    return json.dumps({"table": table, "settings": {"tasks": ["needle"], "lengths": [32, 64], "limit": limit}})


def test_scores_of_the_harness_are_on_the_page(posswap: Posswap, folder: Path, tmp_path: Path) -> None:
    models = json.loads((folder / "results.json").read_text())
    base, other = models["base"], next(name for name in models["models"] if name != models["base"])
    (tmp_path / "base.json").write_text(run_of([0.8, 0.4]))
    (tmp_path / "other.json").write_text(run_of([0.96, 0.3]))
    page = tmp_path / "page.html"
    files = ["--lm-eval", f"{base}={tmp_path / 'base.json'}", "--lm-eval", f"{other}={tmp_path / 'other.json'}"]
    run = posswap("report", folder, "-o", page, *files)
    assert (run.returncode, run.stderr) == (0, "")
    text = page.read_text(encoding="utf-8")
    for shown in ("Tasks of the harness", "needle", "0.96", "120 % kept", "75 % kept", "≥ 64", "&lt; 32"):
        assert shown in text, shown
    assert text.count("% kept") == 2  # not of the base itself
    (tmp_path / "other.json").write_text(run_of([0.96, 0.3], limit=3))
    mixed = posswap("report", folder, "-o", page, *files)
    assert mixed.returncode != 0
    assert "answered different questions: limit 3 and None" in mixed.stderr
    unknown = posswap("report", folder, "-o", page, "--lm-eval", f"nobody={tmp_path / 'base.json'}")
    assert unknown.returncode == 2
    assert "the name of a model of the page" in unknown.stderr


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (None, 4, "does not exist; give the folder that posswap eval or compare wrote"),
        ("{", 4, "cannot read"),
        ('{"kind": "quickstart"}', 4, "needs the results.json of posswap eval or compare, got kind 'quickstart'"),
        ('{"kind": "hf_posswap evaluation", "schema": 9}', 4, "these results have schema 9"),
    ],
)
def test_what_is_no_result_is_said(
    posswap: Posswap, tmp_path: Path, content: str | None, code: int, message: str
) -> None:
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    run = posswap("report", tmp_path)
    assert run.returncode == code
    assert message in run.stderr
    assert run.stderr.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_results_are_never_written_over(posswap: Posswap, folder: Path) -> None:
    for place in (folder, folder / "results.json"):
        run = posswap("report", folder, "-o", place)
        assert run.returncode == 2
        assert "expected a file for the page, such as report.html" in run.stderr
    assert json.loads((folder / "results.json").read_text())["schema"] == 2
