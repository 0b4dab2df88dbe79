"""Write the tables of what serving programs make of positions: the claims, and what the tests of them saw.

python recipes/claims_table.py              # rewrites the regions of .docs/pages/serving.md
python recipes/claims_table.py --check      # changes nothing; exit code 1: the page is stale
python recipes/claims_table.py a.xml b.xml  # what pytest --junitxml=a.xml tests/serving/... saw is put in first

`.ci/serving table` installs the programs, runs their tests and this.
"""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_posswap.checkpoints.exports.claims_table import claims_markdown
from hf_posswap.utils.atomic_io import read_json, write_json, write_text

PAGE = Path(__file__).resolve().parents[1] / ".docs" / "pages" / "serving.md"
SEEN = Path(__file__).parent / "studies" / "results" / "served.json"
"""What the tests saw, by engine: a list of rows as `tests/serving/seen.py` has them."""
_COLUMNS = ("program", "model", "swap", "texts of tokens", "nats apart", "greedy tokens alike")
Rows = dict[str, list[dict[str, Any]]]


def seen_in(report: Path) -> Rows:
    """Return what the tests saw whose report by `pytest --junitxml` is `report`.

    Raises:
        SystemExit: a test failed: the table shows whole runs.
    """
    root = ElementTree.parse(report).getroot()
    if root.find(".//failure") is not None or root.find(".//error") is not None:
        raise SystemExit(f"{report} has tests that failed: nothing was written")
    found: Rows = {}
    for item in root.iterfind(".//property[@name='seen']"):
        row = json.loads(item.attrib["value"])
        found.setdefault(row["engine"], []).append(row)
    return found


def merged(held: Rows, *reports: Rows) -> Rows:
    """Return `held` with what `reports` have in the place of what their programs did, in whatever version, before."""
    found: Rows = {}
    for report in reports:
        for engine, rows in report.items():
            found.setdefault(engine, []).extend(rows)
    programs = {_program(engine) for engine in found}
    kept = {engine: rows for engine, rows in held.items() if _program(engine) not in programs}
    return dict(sorted({**kept, **found}.items()))


def _program(engine: str) -> str:
    return engine.split()[0]


def seen_markdown(held: Rows) -> str:
    """Return the table of what was seen."""
    lines = [_line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    for engine, rows in held.items():
        for row in rows:
            lengths = ", ".join(map(str, row["lengths"]))
            alike = f"{row['same']} of {row['tokens']}" if row["tokens"] else "-"
            lines.append(_line([engine, row["model"], row["swap"], lengths, _below(row["apart"]), alike]))
    return "\n".join(lines)


def _below(apart: float) -> str:
    """Return the power of ten that a difference is below: its digits are other ones on other machines.

    Example:
        >>> _below(4.3e-5), _below(0.0)
        ('< 1e-4', '0')
    """
    return f"< 1e{math.floor(math.log10(apart)) + 1}" if apart else "0"


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def placed(page: str, held: Rows) -> str:
    """Return `page`, the text of a page, with the regions between the marks made anew."""
    return _region(_region(page, "claims table", claims_markdown()), "seen table", seen_markdown(held))


def _region(page: str, name: str, text: str) -> str:
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise SystemExit(f"{PAGE.name} lacks the lines {begin} and {end}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def main(
    reports: Annotated[list[Path] | None, typer.Argument(help="What pytest --junitxml wrote.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Change nothing.")] = False,
) -> None:
    """Rewrite the regions of the page."""
    held: Rows = merged(read_json(SEEN), *map(seen_in, reports or ()))
    page = PAGE.read_text(encoding="utf-8")
    made = placed(page, held)
    if check and made != page:
        raise SystemExit(f"{PAGE.name} has an old table of claims: run python recipes/claims_table.py")
    if not check:
        write_json(SEEN, held)
        write_text(PAGE, made)


if __name__ == "__main__":
    typer.run(main)
