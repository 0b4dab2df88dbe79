"""Writes the tables on positions in serving programs: the claims, and the results of their tests.

python recipes/claims_table.py              # rewrites the regions of .docs/pages/serving.md
python recipes/claims_table.py --check      # changes nothing; exit code 1 if the page is stale
python recipes/claims_table.py a.xml b.xml  # first adds the results of pytest --junitxml=a.xml tests/serving/...

`.ci/serving table` installs the programs, runs their tests and this script.
"""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_posswap.checkpoints.exports.rules import claims_markdown
from hf_posswap.checkpoints.overriding import facts_markdown
from hf_posswap.utils.atomic_io import read_json, write_json, write_text

PAGE = Path(__file__).resolve().parents[1] / ".docs" / "pages" / "serving.md"
SEEN = Path(__file__).parent / "studies" / "results" / "served.json"
"""Results of the tests, by engine: lists of rows of `tests/serving/seen.py`."""
_COLUMNS = ("program", "model", "swap", "texts of tokens", "nats apart", "greedy tokens alike")
Rows = dict[str, list[dict[str, Any]]]


def seen_in(report: Path) -> Rows:
    """Return the test results in `report`, written by `pytest --junitxml`.

    Raises:
        SystemExit: a test failed, and the table shows only complete runs.
    """
    root = ElementTree.parse(report).getroot()
    if root.find(".//failure") is not None or root.find(".//error") is not None:
        raise SystemExit(f"{report} has tests that failed: nothing was written")
    rows_by_engine: Rows = {}
    for item in root.iterfind(".//property[@name='seen']"):
        row = json.loads(item.attrib["value"])
        rows_by_engine.setdefault(row["engine"], []).append(row)
    return rows_by_engine


def merged(rows_by_engine: Rows, *reports: Rows) -> Rows:
    """Return `rows_by_engine`, with all rows of the programs in `reports`, of any version, replaced by theirs."""
    new_rows: Rows = {}
    for report in reports:
        for engine, rows in report.items():
            new_rows.setdefault(engine, []).extend(rows)
    programs = {_program(engine) for engine in new_rows}
    kept = {engine: rows for engine, rows in rows_by_engine.items() if _program(engine) not in programs}
    return dict(sorted({**kept, **new_rows}.items()))


def _program(engine: str) -> str:
    return engine.split()[0]


def seen_markdown(rows_by_engine: Rows) -> str:
    """Return the table of test results."""
    lines = [_line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    for engine, rows in rows_by_engine.items():
        for row in rows:
            lengths = ", ".join(map(str, row["lengths"]))
            matches = f"{row['same']} of {row['tokens']}" if row["tokens"] else "-"
            lines.append(_line([engine, row["model"], row["swap"], lengths, _below(row["apart"]), matches]))
    return "\n".join(lines)


def _below(apart: float) -> str:
    """Return the power of ten above a difference, because its digits vary between machines.

    Example:
        >>> _below(4.3e-5), _below(0.0)
        ('< 1e-4', '0')
    """
    return f"< 1e{math.floor(math.log10(apart)) + 1}" if apart else "0"


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def placed(page: str, rows_by_engine: Rows) -> str:
    """Return the text `page` with the regions between the markers regenerated."""
    regions = {
        "claims table": claims_markdown(),
        "facts table": facts_markdown(),
        "seen table": seen_markdown(rows_by_engine),
    }
    for name, text in regions.items():
        page = _region(page, name, text)
    return page


def _region(page: str, name: str, text: str) -> str:
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, begin_found, rest = page.partition(begin)
    _, end_found, after = rest.partition(end)
    if not begin_found or not end_found:
        raise SystemExit(f"{PAGE.name} lacks the lines {begin} and {end}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def main(
    reports: Annotated[list[Path] | None, typer.Argument(help="What pytest --junitxml wrote.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Change nothing.")] = False,
) -> None:
    """Rewrite the regions of the page."""
    rows_by_engine: Rows = merged(read_json(SEEN), *map(seen_in, reports or ()))
    page = PAGE.read_text(encoding="utf-8")
    new_page = placed(page, rows_by_engine)
    if check and new_page != page:
        raise SystemExit(f"{PAGE.name} has an old table of claims: run python recipes/claims_table.py")
    if not check:
        write_json(SEEN, rows_by_engine)
        write_text(PAGE, new_page)


if __name__ == "__main__":
    typer.run(main)
