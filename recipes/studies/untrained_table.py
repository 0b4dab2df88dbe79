"""The study of swaps without training as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_posswap.utils.format import interval_text
from recipes.studies.measuring import intervals_said


def markdown(result: dict[str, Any]) -> str:
    """Return the results of `recipes.studies.untrained` for people: a table a base, and its command."""
    held = result["versions"]
    lines = [
        "# Reading on without training",
        "",
        f"Nothing is trained; torch {held['torch']}, transformers {held['transformers']}. Nats a token; brackets: "
        f"paired. {intervals_said(result)}",
        "",
        "- 2x, 4x, 8x: the swap made for so many windows of the base, and as many read at once, less the base that "
        "reads the same tokens by half-overlapping windows of its own length. Below 0 the swap is worth it.",
        "- In the window: of the swap made for 8 windows, less the base, on the first window.",
    ]
    for base in result["bases"]:
        lines += ["", *_base(base)]
    return "\n".join(lines) + "\n"


def _base(base: dict[str, Any]) -> list[str]:
    texts, multiples = base["texts"], list(base["sliding"])
    slid = ", ".join(f"{base['sliding'][m]:.3f} over {m}" for m in multiples)
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    for row in base["rows"]:
        rows.setdefault(row["start"], {})[row["windows"]] = row
    head = ["start", *(f"{m}x less the sliding window" for m in multiples), "in the window"]
    return [
        f"## {base['name']}: {base['kind']}, {base['parameters'] / 1e6:.2f} M parameters, {base['window']} positions",
        "",
        f"{texts['documents']} rows of {texts['source']}: {base['protocol']}. The base's loss is {base['nll']:.3f} in "
        f"the window, and by sliding {slid} windows.",
        "",
        _line(head),
        _line(["---"] * len(head)),
        *(_line(_cells(name, found, [int(m) for m in multiples])) for name, found in rows.items()),
        "",
        f"    {base['command']}",
    ]


def _cells(name: str, found: dict[int, dict[str, Any]], multiples: list[int]) -> list[str]:
    cells = [_interval(found[m].get("less_sliding")) for m in multiples]
    return [name, *cells, _interval(found[multiples[-1]].get("in_window"))]


def _interval(found: dict[str, Any] | None) -> str:
    if found is None:
        return "refused"
    return f"{found['difference']:+.3f} [{interval_text(found, '+.3f', ', ')}]"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
