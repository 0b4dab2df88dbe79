"""Write the README's table of what works with what, from what the contract suite found.

    pytest tests/contract                       # writes support.json
    python recipes/support_table.py             # rewrites the region of README.md
    python recipes/support_table.py --check     # changes nothing; exit code 1: the README is stale

Exit code 2: the file or the README cannot be used; the message says why.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_posswap.errors import DataError, PosswapError
from hf_posswap.files import read_json, write_text

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- support table -->", "<!-- /support table -->"
KEYS = {"family", "model_type", "scheme", "kind", "promises", "outcome", "reason", "transformers", "torch"}
CELLS = {"native": "native", "attention": "plugin", "no": "–"}
HELP = (
    "**native**: stock transformers loads the saved checkpoint, no plugin needed. **plugin**: the scheme acts inside "
    "attention; loading needs `hf_posswap`, and plain transformers refuses. **–**: `UnsupportedSwapError`, for the "
    "reason below the table. Promises, with a scheme's defaults, each held to by a test: **P**refix-consistent (a "
    "cached and a full forward agree), **C**ausal only, **R**elative, **T**raining-free, **U**nbounded, **S**hardable "
    "(context parallelism); `posswap schemes` tells what each means."
)

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of the contract suite's file: one a family, model type and scheme.

    Raises:
        CheckpointError: no such file, or no JSON in it.
        DataError: a row lacks a key or has an unknown outcome, a pair has two outcomes, or the versions differ.
    """
    rows = read_json(path)
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{path}: expected a list of rows, got {str(rows)[:60]}. Run the contract suite again.")
    seen: dict[tuple[str, str, str], str] = {}
    for row in rows:
        if not isinstance(row, dict) or set(row) != KEYS or row["outcome"] not in CELLS:
            raise DataError(f"{path}: expected rows with {sorted(KEYS)} and outcome in {list(CELLS)}, got {row!r}.")
        pair = (row["family"], row["model_type"], row["scheme"])
        if seen.setdefault(pair, row["outcome"]) != row["outcome"]:
            raise DataError(f"{path}: {pair} is both {seen[pair]!r} and {row['outcome']!r}: run the suite again.")
    versions = {(row["transformers"], row["torch"]) for row in rows}
    if len(versions) > 1:
        raise DataError(f"{path}: rows of several versions, {sorted(versions)}: run the suite once, whole.")
    return rows


def render(rows: list[Row]) -> str:
    """Return the region's Markdown: the table, what its words mean, and why each missing pair is missing."""
    models = sorted({(row["family"], row["model_type"]) for row in rows})
    schemes = sorted({(row["scheme"], row["kind"], row["promises"]) for row in rows})
    outcomes = {(row["model_type"], row["scheme"]): CELLS[row["outcome"]] for row in rows}
    lines = [_line(["scheme", "kind", "promises", *(f"`{model}`" for _, model in models)])]
    lines.append(_line(["---"] * (3 + len(models))))
    for scheme, kind, promises in schemes:
        cells = [outcomes.get((model, scheme), "not run") for _, model in models]
        lines.append(_line([scheme, kind, f"`{promises}`", *cells]))
    made = (
        f"Made by the contract suite with transformers {rows[0]['transformers']} and torch {_public(rows[0]['torch'])}."
    )
    return "\n".join([*lines, "", HELP, "", *_reasons(rows), made])


def _reasons(rows: list[Row]) -> list[str]:
    """Return a list item for each reason: which schemes it keeps out of which model types."""
    kept_out: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in rows:
        if row["outcome"] == "no":
            kept_out[row["scheme"], _flat(row["reason"])].add(row["model_type"])
    items = [
        f"- {scheme} in {', '.join(f'`{model_type}`' for model_type in sorted(model_types))}: {reason}"
        for (scheme, reason), model_types in sorted(kept_out.items())
    ]
    return [*items, ""] if items else []


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _flat(text: str) -> str:
    return " ".join(text.split())


def _public(version: str) -> str:
    """Return a version without what a build adds to it: 2.13.0+cpu is 2.13.0."""
    return version.partition("+")[0]


def replace_region(readme: str, table: str) -> str:
    """Return `readme` with `table` between the markers.

    Raises:
        DataError: the markers are missing, doubled or in the wrong order.
    """
    before, begin, rest = readme.partition(BEGIN)
    old, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise DataError(f"the README needs {BEGIN} and {END} once each, in this order.")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main(
    support: Annotated[Path, typer.Option(help="What the contract suite wrote.")] = ROOT / "support.json",
    readme: Annotated[Path, typer.Option(help="The file to rewrite.")] = ROOT / "README.md",
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit code 1 where it is stale.")] = False,
) -> None:
    """Write the README's support table from what the contract suite found."""
    try:
        old = readme.read_text(encoding="utf-8")
        new = replace_region(old, render(read_rows(support)))
        if check and new != old:
            typer.echo(f"{readme.name} is stale: run python recipes/support_table.py", err=True)
            raise typer.Exit(1)
        if new != old:
            write_text(readme, new)
    except (PosswapError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    typer.echo(f"{readme.name}: {'as the contract suite found it' if new == old else 'rewritten'}")


if __name__ == "__main__":
    typer.run(main)
