"""recipes/support_table.py as its user runs it: exit codes, the region it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from recipes.support_table import BEGIN, END, main

FRAME = f"# Title\n\n{BEGIN}\n{END}\n\nAfter.\n"
app = typer.Typer()
app.command()(main)


def row(model_type: str, scheme: str, outcome: str = "native", reason: str = "", **more: str) -> dict[str, str]:
    versions = {"transformers": "5.23.0", "torch": "2.13.0+cpu"}
    names = {"family": "learned", "model_type": model_type, "scheme": scheme, "outcome": outcome, "reason": reason}
    return names | {"kind": "bias", "promises": "P.R.U."} | versions | more


ROWS = [
    row("gpt2", "sinusoidal"),
    row("gpt2", "alibi", "attention"),
    row("bert", "alibi", "attention"),
    row("bert", "nope", "no", "an encoder without positions\ncannot order its tokens"),
    row("roberta", "nope", "no", "an encoder without positions cannot order its tokens"),
]


def run(folder: Path, rows: Any, *options: str, readme: str = FRAME) -> tuple[int, str, str]:
    """Return the exit code, all output, and the README afterwards."""
    (folder / "support.json").write_text(rows if isinstance(rows, str) else json.dumps(rows))
    (folder / "README.md").write_text(readme)
    paths = ["--support", str(folder / "support.json"), "--readme", str(folder / "README.md")]
    result = CliRunner().invoke(app, [*paths, *options])
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result.exit_code, result.output, (folder / "README.md").read_text()


def test_the_table_says_what_was_found(tmp_path: Path) -> None:
    code, _, readme = run(tmp_path, ROWS)
    assert code == 0
    table = readme.partition(BEGIN)[2].partition(END)[0].splitlines()
    assert "| scheme | kind | promises | `bert` | `gpt2` | `roberta` |" in table
    assert "| alibi | bias | `P.R.U.` | plugin | plugin | not run |" in table
    assert "| nope | bias | `P.R.U.` | – | not run | – |" in table
    assert "- nope in `bert`, `roberta`: an encoder without positions cannot order its tokens" in table
    assert "Made by the contract suite with transformers 5.23.0 and torch 2.13.0." in table


def test_the_rest_of_the_readme_stays(tmp_path: Path) -> None:
    _, _, readme = run(tmp_path, ROWS)
    assert readme.startswith("# Title\n\n<!--")
    assert readme.endswith("-->\n\nAfter.\n")


def test_the_order_of_the_rows_does_not_matter(tmp_path: Path) -> None:
    assert run(tmp_path, ROWS)[2] == run(tmp_path, ROWS[::-1])[2]


def test_check_tells_stale_from_fresh_and_changes_nothing(tmp_path: Path) -> None:
    fresh = run(tmp_path, ROWS)[2]
    assert run(tmp_path, ROWS, "--check", readme=fresh)[::2] == (0, fresh)
    code, output, after = run(tmp_path, ROWS[:-1], "--check", readme=fresh)
    assert (code, after) == (1, fresh)
    assert "README.md is stale: run python recipes/support_table.py" in output


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("{not json", "cannot read"),
        ([], "expected a list of rows, got []"),
        ({"rows": []}, "expected a list of rows, got {'rows': []}"),
        ([{"family": "learned"}], "expected rows with"),
        ([row("gpt2", "alibi", "perhaps")], "outcome in ['native', 'attention', 'no'], got"),
        ([row("gpt2", "alibi"), row("gpt2", "alibi", "no")], "is both 'native' and 'no'"),
        ([row("gpt2", "alibi"), row("opt", "alibi", transformers="5.14.0")], "rows of several versions"),
    ],
)
def test_a_bad_file_is_refused_in_a_line(tmp_path: Path, rows: Any, message: str) -> None:
    code, output, readme = run(tmp_path, rows)
    assert (code, readme) == (2, FRAME)
    assert message in output
    assert output.count("\n") == 1


@pytest.mark.parametrize("readme", ["# Title\n", f"{END}\n{BEGIN}\n", f"{BEGIN}\n{BEGIN}\n{END}\n", FRAME + FRAME])
def test_a_readme_without_the_markers_is_refused(tmp_path: Path, readme: str) -> None:
    code, output, after = run(tmp_path, ROWS, readme=readme)
    assert (code, after) == (2, readme)
    assert "once each, in this order" in output


def test_missing_files_are_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(FRAME)
    result = CliRunner().invoke(app, ["--support", str(tmp_path / "none"), "--readme", str(tmp_path / "README.md")])
    assert result.exit_code == 2
    assert "none" in result.output
    result = CliRunner().invoke(app, ["--readme", str(tmp_path / "no-readme")])
    assert result.exit_code == 2
    assert "no-readme" in result.output
