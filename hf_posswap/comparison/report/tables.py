"""Tables and heat maps as HTML, which is more accessible and prints better than pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_posswap.comparison.report.charts import short_number
from hf_posswap.comparison.report.looks import mark
from hf_posswap.comparison.report.markup import Markup, tag


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Attributes:
        text: the text.
        order: sort key of the column; None sorts last.
        note: a smaller line below the text, or None.
    """

    text: str
    order: float | None = None
    note: str | None = None


def sortable(header: Sequence[str], rows: Sequence[tuple[int, str, Sequence[Cell]]]) -> Markup:
    """Return a table with sortable columns; the first one is the model.

    Args:
        header: titles of the columns after the first.
        rows: number and name of each model, and its cells.

    Example:
        >>> "<td" in sortable(["perplexity"], [(0, "base", [Cell("3.1", 3.1)])])
        True
    """
    head = [tag("th", tag("button", title, type="button"), scope="col") for title in ["model", *header]]
    body = []
    for row_number, (number, name, cells) in enumerate(rows):
        first = tag("th", mark(number), name, scope="row", data_order=row_number)
        rest = [
            tag(
                "td",
                cell.text,
                cell.note and tag("small", cell.note),
                data_order=None if cell.order is None else f"{cell.order:.10g}",
            )
            for cell in cells
        ]
        body.append(tag("tr", first, *rest))
    table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body), class_="sortable")
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_label="table")


def heat_maps(
    maps: Mapping[str, Mapping[tuple[Any, int], tuple[float, str]]],
    numbers: Mapping[str, int],
    lengths: Sequence[int],
    window: int,
    name_row: Callable[[Any], str],
) -> Markup:
    """Return heat maps side by side, shares from 0 to 1 over rows and lengths.

    Args:
        maps: for each model, a share and a tooltip by row and length.
        numbers: the models' numbers.
        lengths: the columns in tokens; a length that a map lacks is hatched.
        window: the original window, marked by a line.
        name_row: formats the label of a row.

    Example:
        >>> page = heat_maps({"a": {(0.5, 512): (1.0, "5 of 5")}}, {"a": 0}, [512, 1024], 512, str)
        >>> page.count("<td"), page.count("hatched")
        (2, 1)
    """
    return tag("div", *(_heat_map(n, m, numbers[n], lengths, window, name_row) for n, m in maps.items()), class_="maps")


def _heat_map(
    name: str,
    cells: Mapping[tuple[object, int], tuple[float, str]],
    number: int,
    lengths: Sequence[int],
    window: int,
    name_row: Callable[[object], str],
) -> Markup:
    head = [tag("th", short_number(n), scope="col", class_="edge" if n == window else None) for n in lengths]
    lines = [tag("tr", tag("th", class_="corner"), *head)]
    for row in dict.fromkeys(row for row, _ in cells):
        shown = [_heat(cells.get((row, n)), "edge" if n == window else None) for n in lengths]
        lines.append(tag("tr", tag("th", name_row(row), scope="row"), *shown))
    title = tag("figcaption", mark(number), name)
    return tag("figure", title, tag("table", *lines, class_="heat"))


def _heat(cell: tuple[float, str] | None, edge: str | None) -> Markup:
    if cell is None:
        return tag("td", class_=" ".join(filter(None, ["hatched", edge])), data_tip='["not run", []]')
    share, tip = cell
    css_class = " ".join(filter(None, ["strong" if share > 0.55 else None, edge])) or None
    return tag("td", f"{100 * share:.0f}", style=f"--v:{share:.3f}", class_=css_class, data_tip=tip, tabindex=0)
