"""Write the table of what serving programs make of positions, from the claims that `posswap export` reads.

python recipes/claims_table.py           # rewrites the region of .docs/pages/serving.md
python recipes/claims_table.py --check   # changes nothing; exit code 1: the page is stale
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_posswap.checkpoints.exports.claims_table import claims_markdown
from hf_posswap.utils.atomic_io import write_text

PAGE = Path(__file__).resolve().parents[1] / ".docs" / "pages" / "serving.md"
BEGIN, END = "<!-- claims table -->", "<!-- /claims table -->"


def placed(page: str) -> str:
    """Return `page`, the text of a page, with the region between the marks made anew."""
    before, found, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise SystemExit(f"{PAGE.name} lacks the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{claims_markdown()}\n{END}{after}"


def main(check: Annotated[bool, typer.Option("--check", help="Change nothing.")] = False) -> None:
    """Rewrite the region of the page."""
    page = PAGE.read_text(encoding="utf-8")
    made = placed(page)
    if check and made != page:
        raise SystemExit(f"{PAGE.name} has an old table of claims: run python recipes/claims_table.py")
    if not check:
        write_text(PAGE, made)


if __name__ == "__main__":
    typer.run(main)
