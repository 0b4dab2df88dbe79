"""recipes/support_table.py as its user runs it: exit codes, the region it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hf_posswap.schemes import SCHEMES, schemes_for
from recipes.support_table import BEGIN, END, main

FRAME = f"# Title\n\n{BEGIN}\n{END}\n\nAfter.\n"
app = typer.Typer()
app.command()(main)


OTHER = {"outcome": "no", "reason": "Thing has no place for it"}


def row(name: str, outcomes: dict[str, str], reason: str = "", **more: str) -> dict[str, Any]:
    """Return what the light contract writes of a class; schemes that are not named are refused."""
    cells = dict.fromkeys(schemes_for("text"), {**OTHER, "reason": OTHER["reason"].replace("Thing", name)})
    cells |= {scheme: {"outcome": outcome, "reason": reason} for scheme, outcome in outcomes.items()}
    versions = {"transformers": "5.23.0", "torch": "2.13.0+cpu"}
    return {"class": name, "model_types": [name.lower()], "family": "learned", **versions, "schemes": cells} | more


ROWS = [
    row("Gpt", {"sinusoidal": "native", "alibi": "attention"}),
    row("Opt", {"sinusoidal": "native", "alibi": "attention"}),
    row("Bert", {"sinusoidal": "native", "alibi": "no"}, "alibi needs\nheads, and Bert has none"),
    row("Mamba", {}),
]


def run(folder: Path, rows: Any, *options: str, page: str = FRAME) -> tuple[int, str, str]:
    """Return the exit code, all output, and the page afterwards."""
    (folder / "support").mkdir(exist_ok=True)
    for old in (folder / "support").iterdir():
        old.unlink()
    for index, held in enumerate(rows):
        (folder / "support" / f"{index}.json").write_text(held if isinstance(held, str) else json.dumps(held))
    (folder / "support.md").write_text(page)
    paths = ["--support", str(folder / "support"), "--page", str(folder / "support.md")]
    result = CliRunner().invoke(app, [*paths, *options])
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result.exit_code, result.output, (folder / "support.md").read_text()


def test_the_table_says_what_was_found(tmp_path: Path) -> None:
    code, _, page = run(tmp_path, ROWS)
    assert code == 0
    table = page.partition(BEGIN)[2].partition(END)[0]
    lines = table.splitlines()
    assert "**3 of 4 classes** for causal, masked and sequence-to-sequence" in table
    assert "transformers 5.23 can be patched, 5 pairs of a class and a scheme." in table
    assert f"| `alibi` | bias | `P.R.U.` | {SCHEMES.get('alibi').summary} |" in lines
    others = ", ".join(name for name in schemes_for("text") if name not in ("alibi", "sinusoidal"))
    assert f"| classes | model types | alibi | {others} | sinusoidal |" in lines
    assert "| 2 | `gpt`, `opt` | plugin | – | native |" in lines
    assert "| 1 | `bert` | – | – | native |" in lines
    assert "- alibi in `bert`: it needs heads, and the model has none" in lines
    assert f"- {others} in `bert`, `gpt`, `opt`: the model has no place for it" in lines
    assert "- `Mamba`: the model has no place for it" in lines
    assert "Classes that cannot be patched, and why (1)" in table


def test_a_share_of_the_classes_is_checked_against_their_rows(tmp_path: Path) -> None:
    _, _, page = run(tmp_path, ROWS)
    for share in ([ROWS[0]], [ROWS[2], ROWS[3]], ROWS):
        code, output, same = run(tmp_path, share, "--check", "--partial", page=page)
        assert (code, same) == (0, page), output
        assert f"found these {len(share)} classes" in output
    changed = [row("Gpt", {"sinusoidal": "native"}), row("Mamba", {"alibi": "attention"}), row("New", {})]
    for one in changed:
        code, output, same = run(tmp_path, [ROWS[2], one], "--check", "--partial", page=page)
        assert (code, same) == (1, page)
        assert f"is stale, of {one['class']}: run" in output
    assert run(tmp_path, ROWS[:1], "--partial", page=page)[::2] == (2, page)


def test_the_rest_of_the_page_stays(tmp_path: Path) -> None:
    _, _, page = run(tmp_path, ROWS)
    assert page.startswith("# Title\n\n<!--")
    assert page.endswith("-->\n\nAfter.\n")


def test_check_tells_stale_from_fresh_and_changes_nothing(tmp_path: Path) -> None:
    fresh = run(tmp_path, ROWS)[2]
    assert run(tmp_path, ROWS, "--check", page=fresh)[::2] == (0, fresh)
    code, output, after = run(tmp_path, ROWS[:-1], "--check", page=fresh)
    assert (code, after) == (1, fresh)
    assert "support.md is stale: run python recipes/support_table.py" in output


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["{not json"], "cannot read"),
        ([], "holds no .json file. Run pytest -m slow tests/contract/test_light.py first."),
        ([["Gpt"]], "expected ["),
        ([{"class": "Gpt"}], "expected ['class', "),
        ([row("Gpt", {"alibi": "perhaps"})], "outcomes in ['native', 'attention', 'no'], got"),
        ([row("Gpt", {}), row("Opt", {}, transformers="5.14.0")], "rows of several runs"),
        ([row("Gpt", {}), row("Opt", {"new": "no"})], "rows of several runs"),
    ],
)
def test_a_bad_file_is_refused_in_a_line(tmp_path: Path, rows: Any, message: str) -> None:
    code, output, page = run(tmp_path, rows)
    assert (code, page) == (2, FRAME)
    assert message in output
    assert output.count("\n") == 1


@pytest.mark.parametrize("page", ["# Title\n", f"{END}\n{BEGIN}\n", f"{BEGIN}\n{BEGIN}\n{END}\n", FRAME + FRAME])
def test_a_page_without_the_markers_is_refused(tmp_path: Path, page: str) -> None:
    code, output, after = run(tmp_path, ROWS, page=page)
    assert (code, after) == (2, page)
    assert "once each, in this order" in output


def test_missing_files_are_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "support.md").write_text(FRAME)
    result = CliRunner().invoke(app, ["--support", str(tmp_path / "none"), "--page", str(tmp_path / "support.md")])
    assert result.exit_code == 2
    assert "none" in result.output
    result = CliRunner().invoke(app, ["--page", str(tmp_path / "no-page")])
    assert result.exit_code == 2
    assert "no-page" in result.output
