"""The effects study as Markdown."""

from __future__ import annotations

from typing import Any

from hf_posswap.evaluation.statistics import LEAST_DOCUMENTS
from hf_posswap.utils.format import interval_text
from recipes.studies.measuring import intervals_said

_HEAD = (
    "recipe", "base", "tokens", "trained at", "base's loss", "control", "before training", "after",
    "after less control", "1x", "2x", "4x", "8x", "8th window", "runs with",
)  # fmt: skip
_ROUTES = {"native": "stock transformers", "plugin": "hf_posswap"}


def markdown(result: dict[str, Any]) -> str:
    """Return the results of `recipes.studies.effects` as Markdown: the rows, the bases, and every command."""
    rows = result["rows"]
    lines = [
        "# What each recipe does, on small models",
        "",
        *_about(result),
        _line(_HEAD),
        _line(["---"] * len(_HEAD)),
        *(_row(row) for row in rows),
        "",
        *_notes(rows),
        "## Without a swap",
        "",
        "The same lengths, read by the bases and by the controls.",
        "",
        _line(["model", "base", "1x", "2x", "4x", "8x"]),
        _line(["---"] * 6),
        *_plain(rows),
        "",
        "## Commands",
        "",
        *_commands(rows, result.get("remark")),
    ]
    return "\n".join(lines) + "\n"


def _about(result: dict[str, Any]) -> list[str]:
    """Return the paragraphs above the table: what was trained, and what the columns mean."""
    rows, sizes, installed = result["rows"], result["sizes"], result["versions"]
    pretrained = ", ".join(f"{base_name} {tokens / 1e6:.1f} M tokens" for base_name, tokens in sizes["tokens"])
    texts = rows[0]["texts"]
    fewest = min((row["texts"]["documents"] for row in rows), default=LEAST_DOCUMENTS)
    few = f" With fewer than {LEAST_DOCUMENTS} documents, do not rank the recipes." if fewest < LEAST_DOCUMENTS else ""
    return [
        f"Made by `python -m recipes.studies.effects`, torch {installed['torch']}, "
        f"transformers {installed['transformers']}, seed {result['seed']}. Bases: {sizes['layers']} layers, "
        f"width {sizes['width']}, window {sizes['window']}, trained on Python's own text ({pretrained}). "
        "All recipes read about "
        f"{sizes['steps'] * sizes['step']:,} tokens at a learning rate of {sizes['rate']:g}, and their controls as "
        "many, without a swap. One seed, one corpus and undertrained bases: a guide to what to expect of a recipe, not "
        "a ranking of methods.",
        "",
        f"Loss in nats/token on {texts['documents']} held-out documents, {texts['tokens of a piece']} tokens "
        f"each; brackets: paired intervals. {intervals_said(result)}{few}",
        "",
        "- Trained at: the longest training windows, in windows of the base.",
        "- From base's loss to the difference: in the window, over eight separate windows of each document.",
        "- 1x to 8x: after training, with that many windows read at once from the start of each document; a dash: "
        "beyond the model's limit. Later text may be easier than the start, so the loss may fall anyway.",
        "- 8th window: the loss of its tokens after seven windows of context, less their loss alone. Below 0 the model "
        "uses the far text; above 0 length harms it.",
        "",
    ]


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def _row(row: dict[str, Any]) -> str:
    inside, last = row["in_window"], row.get("last_window")
    name = f"{row['recipe']} (demonstration)" if row["demonstration"] else row["recipe"]
    digits = _digits(row)
    losses = [_number(inside[key], digits) for key in ("base", "control", "before", "after")]
    cells = [name, _base(row), f"{row['tokens']:,}", f"{row['training_windows']}x", *losses, _interval(inside, digits)]
    cells += [*_lengths(row, "after"), "–" if last is None else _interval(last, digits), _ROUTES[row["route"]]]
    return _line(cells)


def _base(row: dict[str, Any]) -> str:
    return row["base"] if row["measure"] == "next token" else f"{row['base']}, {row['measure']}"


def _digits(row: dict[str, Any]) -> int:
    return 5 if row["measure"] == "1 - cosine" else 3


def _number(value: float, digits: int) -> str:
    return f"{value if abs(value) >= 0.5 * 10**-digits else 0.0:.{digits}f}"  # rounding has no sign


def _interval(change: dict[str, Any], digits: int) -> str:
    return f"{change['difference']:+.{digits}f} [{interval_text(change, f'+.{digits}f', ', ')}]"


def _lengths(row: dict[str, Any], name: str) -> list[str]:
    digits = _digits(row)
    return [_number(cell[name]["nll"], digits) if name in cell else "–" for cell in row["lengths"]]


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    notes = [f"- {row['recipe']} is a demonstration: {row['demonstration']}." for row in rows if row["demonstration"]]
    if any(row["measure"] == "1 - cosine" for row in rows):
        notes.append(
            "- 1 - cosine: between the pooled states and those of the unswapped encoder, which reads longer texts in "
            "windows."
        )
    return [*notes, ""] if notes else []


def _plain(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of bases and controls, each once, with their recipes."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        for name in ("base", "control"):
            key = (name, _base(row), *_lengths(row, name))
            lines.setdefault(key, []).append(row["recipe"])
    return [
        _line([name if name == "base" else f"control of {', '.join(recipes)}", *cells])
        for (name, *cells), recipes in lines.items()
    ]


def _commands(rows: list[dict[str, Any]], remark: str | None) -> list[str]:
    """Return an optional remark and all commands, those of bases and controls once, with $WORK for the work folder."""
    lines, listed = [], set()
    for row in rows:
        for role in ("base", "search", "recipe", "control"):
            command = row["commands"].get(role)
            if command is not None and command not in listed:
                listed.add(command)
                name = row["base"] if role == "base" else row["recipe"]
                lines.append(f"- {role} {name if role != 'control' else 'of ' + name}: `{command}`")
    return [" ".join(filter(None, ("$WORK is a folder of your choice.", remark))), "", *lines]
