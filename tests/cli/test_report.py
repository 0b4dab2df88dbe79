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
