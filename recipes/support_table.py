"""Writes the support table from the results of the light contract.

    pytest -m slow tests/contract/test_light.py   # writes support/, one file a model class
    python recipes/support_table.py               # rewrites the region of .docs/pages/support.md
    python recipes/support_table.py --check       # changes nothing; exit code 1 if the page is stale
    python recipes/support_table.py --check --partial   # likewise, where a share of the classes was run

Exit code 2: the files or the page are invalid; the message says why.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_posswap.errors import DataError, PosswapError
from hf_posswap.schemes import schemes_for
from hf_posswap.utils.atomic_io import read_json, write_text

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- support table -->", "<!-- /support table -->"
KEYS = {"class", "model_types", "family", "transformers", "torch", "schemes"}
CELLS = {"native": "native", "attention": "plugin", "no": "–"}
PROMISES = (
    "Guarantees with a scheme's defaults, each tested: **P**refix-consistent (a cached and a full forward "
    "agree), **C**ausal only, **R**elative, **T**raining-free, **U**nbounded, **S**hardable (context parallelism); "
    "`posswap schemes` explains each."
)
WORDS = (
    "**native**: stock transformers loads the saved checkpoint, no plugin needed. **plugin**: the scheme acts inside "
    "attention; loading needs `hf_posswap`, and plain transformers refuses. **–**: `UnsupportedSwapError`, with the "
    "reason."
)

Row = dict[str, Any]


def read_rows(folder: Path) -> list[Row]:
    """Return what the light contract wrote, one row a model class, by name.

    Raises:
        CheckpointError: a file cannot be read.
        DataError: there are none, one lacks a key or has an unknown outcome, or the versions or schemes differ.
    """
    rows = [read_json(path) for path in sorted(folder.glob("*.json"))]
    if not rows:
        raise DataError(f"{folder} holds no .json file. Run pytest -m slow tests/contract/test_light.py first.")
    for row in rows:
        if not isinstance(row, dict) or set(row) != KEYS or not _outcomes(row) <= set(CELLS):
            raise DataError(f"{folder}: expected {sorted(KEYS)} and outcomes in {list(CELLS)}, got {str(row)[:80]}.")
    versions = {(row["transformers"], row["torch"]) for row in rows}
    if len(versions) > 1 or len({tuple(sorted(row["schemes"])) for row in rows}) > 1:
        raise DataError(f"{folder}: rows of several runs, {sorted(versions)}: delete it and run the contract again.")
    return rows


def _outcomes(row: Row) -> set[str]:
    return {cell.get("outcome") for cell in row["schemes"].values()}


def render(rows: list[Row]) -> str:
    """Return the region's Markdown: the schemes, classes x schemes with the count, and the classes left out."""
    supported = [row for row in rows if _outcomes(row) != {"no"}]
    cells = sum(cell["outcome"] != "no" for row in supported for cell in row["schemes"].values())
    release = ".".join(rows[0]["transformers"].split(".")[:2])  # every patch release has the same results
    head = (
        f"**{len(supported)} of {len(rows)} classes** for causal, masked and sequence-to-sequence language "
        f"modelling in transformers {release} can be patched, {cells} pairs of a class and a "
        "scheme. Each pair was run on a tiny model by the light contract (`pytest -m slow "
        "tests/contract/test_light.py`), with "
        f"torch {rows[0]['torch'].partition('+')[0]}."
    )
    sections = [_schemes_table(), PROMISES, head, _pairs_table(supported), WORDS, _refusals(supported)]
    left_out = _folded(
        f"Classes that cannot be patched, and why ({len(rows) - len(supported)})", _left_out(rows, supported)
    )
    return "\n\n".join([*sections, left_out])


def _schemes_table() -> str:
    lines = [_line(["scheme", "kind", "guarantees", "summary"]), _line(["---"] * 4)]
    for name, scheme in schemes_for("text").items():
        lines.append(_line([f"`{name}`", scheme.kind, f"`{scheme().traits.letters()}`", scheme.summary]))
    return "\n".join(lines)


def _pairs_table(rows: list[Row]) -> str:
    """Return a table with one line per group of equal classes, and one column per group of equal schemes."""
    columns: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for scheme in schemes_for("text"):
        columns[tuple(row["schemes"][scheme]["outcome"] for row in rows)].append(scheme)
    lines: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for index, row in enumerate(rows):
        lines[tuple(column[index] for column in columns)].append(row)
    out = [_line(["classes", "model types", *(", ".join(schemes) for schemes in columns.values())])]
    out.append(_line(["---"] * (2 + len(columns))))
    for outcomes, members in sorted(lines.items(), key=lambda line: -len(line[1])):
        types = sorted({f"`{model_type}`" for row in members for model_type in row["model_types"]})
        out.append(_line([str(len(members)), ", ".join(types), *(CELLS[outcome] for outcome in outcomes)]))
    return "\n".join(out)


def stale_classes(rows: list[Row], page: str) -> list[str]:
    """Return the classes for which the table in `page` does not say what `rows`, of some of all classes, found."""
    lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in page.splitlines()]
    head = next((line for line in lines if line[:2] == ["classes", "model types"]), [])
    cells_of_type: dict[str, list[dict[str, str]]] = defaultdict(list)
    for line in lines:
        if len(line) == len(head) and line[0].isdigit():
            outcomes = zip(head[2:], line[2:], strict=True)
            cells = {scheme: cell for schemes, cell in outcomes for scheme in schemes.split(", ")}
            for model_type in re.findall(r"`([^`]+)`", line[1]):
                cells_of_type[model_type].append(cells)
    left_out = {name for line in page.splitlines() if line.startswith("- `") for name in re.findall(r"`(\w+)`", line)}
    stale = []
    for row in rows:
        outcomes_by_scheme = {scheme: CELLS[cell["outcome"]] for scheme, cell in row["schemes"].items()}
        if _outcomes(row) == {"no"}:
            is_said = row["class"] in left_out
        else:
            is_said = all(outcomes_by_scheme in cells_of_type[model_type] for model_type in row["model_types"])
        if not is_said:
            stale.append(row["class"])
    return stale


def _refusals(rows: list[Row]) -> str:
    """Return a folded list of refused pairs in classes that support other schemes."""
    reasons: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for row in rows:
        for scheme, cell in row["schemes"].items():
            if cell["outcome"] == "no":
                reason = _flat(cell["reason"].replace(row["class"], "the model").replace(f"{scheme} ", "it ", 1))
                reasons[reason][scheme].update(row["model_types"])
    items = [f"- {_who(schemes)}: {reason}" for reason, schemes in sorted(reasons.items())]
    return _folded(f"Why the pairs marked – are refused ({len(items)} reasons)", items)


def _who(schemes: dict[str, set[str]]) -> str:
    """Return the schemes and model types of one reason."""
    types = sorted({f"`{model_type}`" for model_types in schemes.values() for model_type in model_types})
    return f"{', '.join(sorted(schemes))} in {', '.join(types)}"


def _left_out(rows: list[Row], able: list[Row]) -> list[str]:
    reasons: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row not in able:
            reason = next(iter(row["schemes"].values()))["reason"]
            reasons[_flat(reason.replace(row["class"], "the model"))].append(f"`{row['class']}`")
    return [f"- {', '.join(names)}: {reason}" for reason, names in sorted(reasons.items(), key=lambda item: item[1])]


def _folded(title: str, items: list[str]) -> str:
    return "\n".join(['<details markdown="1">', f"<summary>{title}</summary>", "", *items, "", "</details>"])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _flat(text: str) -> str:
    """Return `text` in one line, without hints on adding a family."""
    return " ".join(text.partition("\nNear names: ")[0].partition("\n`posswap families`")[0].split())


def replace_region(page: str, table: str) -> str:
    """Return `page` with `table` between the markers.

    Raises:
        DataError: the markers are missing, doubled or in the wrong order.
    """
    before, begin, rest = page.partition(BEGIN)
    old, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise DataError(f"the page needs {BEGIN} and {END} once each, in this order.")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main(
    support: Annotated[Path, typer.Option(help="What the light contract wrote.")] = ROOT / "support",
    page: Annotated[Path, typer.Option(help="The file to rewrite.")] = ROOT / ".docs" / "pages" / "support.md",
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit code 1 where it is stale.")] = False,
    partial: Annotated[bool, typer.Option("--partial", help="With --check: only the classes that were run.")] = False,
) -> None:
    """Write the support table from the results of the light contract."""
    if partial and not check:
        typer.echo("--partial needs --check: a table of some classes would leave out the others.", err=True)
        raise typer.Exit(2)
    try:
        old = page.read_text(encoding="utf-8")
        rows = read_rows(support)
        if partial:
            if stale := stale_classes(rows, old):
                typer.echo(
                    f"{page.name} is stale, of {', '.join(stale)}: run the light contract on all classes", err=True
                )
                raise typer.Exit(1)
            typer.echo(f"{page.name}: as the light contract found these {len(rows)} classes")
            return
        new = replace_region(old, render(rows))
        if check and new != old:
            typer.echo(f"{page.name} is stale: run python recipes/support_table.py", err=True)
            raise typer.Exit(1)
        if new != old:
            write_text(page, new)
    except (PosswapError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    typer.echo(f"{page.name}: {'as the light contract found it' if new == old else 'rewritten'}")


if __name__ == "__main__":
    typer.run(main)
