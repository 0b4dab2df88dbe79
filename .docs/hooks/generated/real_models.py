"""The tables of the page on real models, from the results of `recipes.studies.real_model`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from repository import ROOT

from generated.markup import table
from recipes.studies.real_model_tables import by_reader

_RESULTS = ROOT / "recipes/studies/results/real-model"
_BASE, _SLIDING = "base", "sliding window"


def render() -> str:
    """Return the losses by range of positions of both lengths, less the sliding window's."""
    return "\n\n".join(_by_length(length) for length in (16, 32))


def kept() -> str:
    """Return what other mechanisms keep of the base on short windows, by tokens of training."""
    page = (_RESULTS / "within.md").read_text(encoding="utf-8")
    first = page[page.index("\n| ") + 1 :].partition("\n\n")[0]  # the second says after how many tokens 98 % is kept
    head, rule, *rows = first.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *rows)]
    wanted = ("mechanism", "tokens", "documents", "above the base", "kept")
    columns = [cells[0].index(name) for name in wanted]
    shown = [[row[column] for column in columns] for row in cells[1:] if row[0] != _BASE]
    return table(wanted, sorted(shown, key=lambda row: (row[0], int(row[1].replace(",", "")))))


def _by_length(length: int) -> str:
    result: dict[str, Any] = json.loads((_RESULTS / f"beyond-{length}k.json").read_text(encoding="utf-8"))
    window, block = result["model"]["window"] // result["block"], result["block"] // 1024
    ranges = [(0, window), *((start, start + window // 2) for start in range(window, length // block, window // 2))]
    head = (f"{length}k tokens", "books", *(f"{start * block}-{stop * block}k" for start, stop in ranges))
    return table(head, _rows(result["units"], ranges))


def _rows(units: Sequence[dict[str, Any]], ranges: Sequence[tuple[int, int]]) -> Iterator[Sequence[str]]:
    books = by_reader(units)
    least = books[_SLIDING]
    means = np.stack(list(least.values()))
    yield (f"the {_SLIDING}'s loss", str(len(means)), *(f"{means[:, a:b].mean():.3f}" for a, b in ranges))
    for reader, losses in sorted(books.items(), key=lambda item: item[0] != _BASE):
        if reader == _SLIDING:
            continue
        apart = np.stack([losses[document] - least[document] for document in losses])
        yield (f"{reader}, less that", str(len(apart)), *(f"{apart[:, a:b].mean():+.3f}" for a, b in ranges))
