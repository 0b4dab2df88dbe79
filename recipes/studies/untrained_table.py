"""The study of swaps without training as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_posswap.utils.format import interval_text
from recipes.studies.measuring import intervals_said


def markdown(result: dict[str, Any]) -> str:
    """Return the results of `recipes.studies.untrained` as Markdown: a table per base, and its command."""
    lines = [
        "# Reading on without training",
        "",
        "Nothing is trained. Nats/token; brackets: paired intervals.",
        "",
        "- 2x, 4x, 8x: a swap for that many windows, which are read at once, less the base with half-overlapping "
        "sliding windows of its length on the same tokens. Below 0, the swap is better.",
        "- In the window: the swap for 8 windows less the base, on the first window.",
    ]
    for base in result["bases"]:
        lines += ["", *_base(base)]
    return "\n".join(lines) + "\n"


def _base(base: dict[str, Any]) -> list[str]:
    texts, multiples, installed = base["texts"], list(base["sliding"]), base["versions"]
    sliding_text = ", ".join(f"{base['sliding'][m]:.3f} over {m}" for m in multiples)
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    for row in base["rows"]:
        rows.setdefault(row["start"], {})[row["windows"]] = row
    head = ["start", *(f"{m}x less the sliding window" for m in multiples), "in the window"]
    return [
        f"## {base['name']}: {base['kind']}, {base['parameters'] / 1e6:.2f} M parameters, {base['window']} positions",
        "",
        f"{texts['documents']} rows of {texts['source']}: {base['protocol']}. The base's loss is {base['nll']:.3f} in "
        f"the window, and with the sliding window {sliding_text} windows; torch {installed['torch']}, transformers "
        f"{installed['transformers']}. {intervals_said(base)}",
        "",
        _line(head),
        _line(["---"] * len(head)),
        *(_line(_cells(name, by_multiple, [int(m) for m in multiples])) for name, by_multiple in rows.items()),
        "",
        f"    {base['command']}",
    ]


def _cells(name: str, row_by_multiple: dict[int, dict[str, Any]], multiples: list[int]) -> list[str]:
    cells = [_interval(row_by_multiple[m].get("less_sliding")) for m in multiples]
    return [name, *cells, _interval(row_by_multiple[multiples[-1]].get("in_window"))]


def _interval(change: dict[str, Any] | None) -> str:
    if change is None:
        return "refused"
    return f"{change['difference']:+.3f} [{interval_text(change, '+.3f', ', ')}]"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
