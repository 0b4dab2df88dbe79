"""The table of goals by recipe: what the studies of adaptation and of needles reached, and what they missed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from repository import PAGE_OF, ROOT

from generated.markup import table

_RESULTS = "recipes/studies/results"
_OTHERS = ("/ablations", "/curve/", "/real/")
OF_RECIPES = tuple(
    source for source in PAGE_OF if source.endswith("/adaptation.md") and not any(name in source for name in _OTHERS)
)
"""Results of the study of adaptation that are about one recipe: not those that vary one, or have another's base."""
_HEAD = (
    "recipe",
    "base, tokens, seeds",
    "in the window: minus the control, minus the base",
    "far text: the last window after seven others, less alone",
    "eight windows minus the control's sliding window",
    "needles at four windows",
)
_SHOWN = ("from_control", "far_text", "from_sliding_control")


def render() -> str:
    """Return the table, its recipes linked to their pages."""
    return table(_HEAD, [*_adapted(), *_retrieval_rows()])


def _adapted() -> Iterator[Sequence[str]]:
    """Give a row of each study of one recipe against its control: of the recipe as it is."""
    for source in OF_RECIPES:
        result = _read(source)
        row = result["rows"][0]
        reached = [_verdict(goal["reached"]) for goal in row["goals"]]
        window, far, sliding = (f"{row[key]['difference']:+.3f}" for key in _SHOWN)
        both = f"{window}, {row['from_base']['difference']:+.3f}"
        cells = [f"{difference}: {verdict}" for difference, verdict in zip((both, far, sliding), reached, strict=True)]
        yield (_linked(row["recipe"], source), _of(result), *cells, "–")


def _retrieval_rows() -> Iterator[Sequence[str]]:
    source = f"{_RESULTS}/retrieval.md"
    result = _read(source)
    for goal in result["goals"]:
        if goal["goal"].startswith("finds them at"):
            cell = f"{goal['found']}: {_verdict(goal['reached'])}"
            yield (_linked(goal["recipe"], source), _of(result), "–", "–", "–", cell)


def _read(source: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((ROOT / source).with_suffix(".json").read_text(encoding="utf-8"))
    return result


def _of(result: dict[str, Any]) -> str:
    base = result["base"]
    return f"{base['name']} ({base['parameters'] / 1e6:.1f} M), {result['tokens']:,}, {result['seeds']}"


def _linked(name: str, source: str) -> str:
    return f"[{name}]({PAGE_OF[source]})"  # as recipes.md, which holds it, links in the site


def _verdict(reached: bool) -> str:
    return "reached" if reached else "**missed**"
