"""Plans as text: rows of edits, and the table that `print(plan)` shows."""

from __future__ import annotations

from collections.abc import Iterable

from hf_posswap.patching.edits.edit import Edit
from hf_posswap.utils.format import human_bytes
from hf_posswap.utils.printable import in_lines

Row = tuple[str, str, str, str]
EDIT_HEADER: Row = ("site", "path", "before", "after")


def table(title: str, rows: list[Row], facts: list[tuple[str, str]]) -> str:
    """Return a title, a table of edits and their consequences, as text."""
    lines = [EDIT_HEADER, *rows]
    widths = [max(len(row[i]) for row in lines) for i in range(4)]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in lines]
    shown.insert(1, "  ".join("-" * width for width in widths))
    return in_lines([title, "", *shown, "", *(f"{name:<11} {value}" for name, value in facts)])


def edit_rows(edits: Iterable[Edit]) -> list[Row]:
    """Return one row per edit, with the columns of EDIT_HEADER; edits that differ only in the layer share a row."""
    groups: dict[Row, list[str]] = {}
    for edit in edits:
        pattern = ".".join("*" if segment.isdigit() else segment for segment in edit.path.split("."))
        groups.setdefault((edit.site, pattern, edit.before, edit.after), []).append(edit.path)
    rows = []
    for (site, pattern, before, after), paths in groups.items():
        shown = paths[0] if len(paths) == 1 else f"{pattern} ({len(paths)} layers)"
        rows.append((site, shown, before, after))
    return rows


def sizes(parameters: dict[str, int]) -> str:
    """Return parameters and their numbers of elements as text."""
    if not parameters:
        return "no parameters"
    return ", ".join(
        f"{name} ({count} values, {human_bytes(4 * count)} in float32)" for name, count in parameters.items()
    )
