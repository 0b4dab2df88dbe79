"""`posswap explain --html`: the page, alone and of a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Posswap, says


def test_a_page_of_schemes_needs_no_model(posswap: Posswap, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    run = posswap("explain", "--html", "-o", page)
    assert (run.returncode, run.stderr) == (0, "")
    assert says(run.stdout, f"Saved to {page}")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_shape_of_ones_own_is_the_first_of_the_page(posswap: Posswap, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    run = posswap("explain", "--html", "--heads", 2, "--dim", 8, "--window", 24, "--rope-theta", 500, "-o", page)
    assert (run.returncode, run.stderr) == (0, "")
    text = page.read_text(encoding="utf-8")
    assert "your own: 2 heads of 8, window 24, base 500" in text
    settings = json.loads(text.partition('id="settings">')[2].partition("</script>")[0])
    assert settings["start"]["settings"] == {"shape": "your own", "factor": 4.0}


def test_a_page_of_a_model_has_its_plan(posswap: Posswap, llama: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    run = posswap("explain", llama, "yarn:factor=4", "--html", "-o", page, "--json")
    assert json.loads(run.stdout) == {"page": str(page)}
    held = page.read_text(encoding="utf-8")
    assert "LlamaForCausalLM: yarn(" in held
    assert f"posswap patch {llama} yarn:factor=4 -o llama-yarn" in held


def test_a_refused_swap_is_on_the_page_and_in_the_exit_code(posswap: Posswap, bert: Path, tmp_path: Path) -> None:
    run = posswap("explain", bert, "nope", "--html", "-o", tmp_path / "page.html")
    assert run.returncode == 3
    assert "refused: nope" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give a MODEL: a folder with a checkpoint, or a Hub id. posswap explain --html needs none."),
        (("gpt2", "--out", "x.html"), "--out x.html is for the page of --html"),
        (("--html", "x.html"), "'x.html': --html takes no file, --out names it"),
        (("gpt2", "--html", "x.html"), "'x.html': --html takes no file, --out names it"),
        (("--html", "--max-length", "64"), "--max-length, --site and --relative say how to put in a scheme"),
        (("--html", "--heads", "0"), "heads is a whole number from 1 to 1,024; got 0"),
        (("--html", "--rope-theta", "1"), "base (rope_theta) is a number above 1, got 1.0"),
        (("gpt2", "--html", "--dim", "8"), "the page of a MODEL has its shape: leave out --heads, --dim"),
        (("gpt2", "--window", "8"), "--heads, --dim, --window and --rope-theta give a shape to the page of --html"),
    ],
)
def test_what_is_wrong_is_one_line(posswap: Posswap, arguments: tuple[str, ...], words: str) -> None:
    run = posswap("explain", *arguments)
    assert (run.returncode, run.stdout) == (2, "")
    assert says(run.stderr, words)


def test_a_page_that_cannot_be_written_is_a_matter_of_files(posswap: Posswap, tmp_path: Path) -> None:
    run = posswap("explain", "--html", "-o", tmp_path)
    assert run.returncode == 4
    assert "is a folder; give a file" in run.stderr
