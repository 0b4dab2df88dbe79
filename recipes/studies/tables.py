"""The effects study as Markdown."""

from __future__ import annotations

from typing import Any

from hf_posswap.evaluation.statistics import LEAST_DOCUMENTS

_HEAD = (
    "recipe", "base", "tokens", "base's loss", "control", "before training", "after", "after less control",
    "1x", "2x", "4x", "8x", "8th window in context, less alone", "runs with",
)  # fmt: skip
_ROUTES = {"native": "stock transformers", "plugin": "hf_posswap"}


def markdown(result: dict[str, Any]) -> str:
    """Return the results of `recipes.studies.effects` for people: the rows, the bases, and every command."""
    rows, sizes = result["rows"], result["sizes"]
    window = sizes["window"]
    texts = rows[0]["texts"]
    lines = [
        "# What each recipe does, on small models",
        "",
        f"Made by `python -m recipes.studies.effects`, torch {result['versions']['torch']}, transformers "
        f"{result['versions']['transformers']}, seed {result['seed']}. Bases: {sizes['layers']} layers, width "
        f"{sizes['width']}, window {window}, trained on Python's own text ("
        + ", ".join(f"{kind} {tokens / 1e6:.1f} M tokens" for kind, tokens in sizes["tokens"])
        + f"). All recipes read about {sizes['steps'] * sizes['step']:,} tokens at a learning rate of "
        f"{sizes['rate']:g}; their controls read as many, without a swap.",
        "",
        f"Loss in nats a token on {texts['documents']} held-out documents, {texts['tokens of a piece']} tokens of each"
        + (f": under {LEAST_DOCUMENTS} documents, so read no order into it" if _few(rows) else "")
        + ". The columns up to the difference are in the window: eight windows of each document, each by itself; "
        "brackets are 95 % intervals, paired over documents. 1x to 8x: after training, so many windows read at once "
        "from the start of each document; a dash: the model ends before. Later text may be easier than the start, so "
        "the last but one column compares the same tokens: do those of the eighth window gain (below 0) or lose "
        "(above) by the seven windows before them?",
        "",
        _line(_HEAD),
        _line(["---"] * len(_HEAD)),
        *(_row(row) for row in rows),
        "",
        *_notes(rows),
        "## Without a swap",
        "",
        "The same lengths, read by the bases and by the controls. One seed and one corpus: differences below 0.01 "
        "between rows mean nothing.",
        "",
        _line(["model", "base", "1x", "2x", "4x", "8x"]),
        _line(["---"] * 6),
        *_plain(rows),
        "",
        "## Commands",
        "",
        *_commands(rows),
    ]
    return "\n".join(lines) + "\n"


def _few(rows: list[dict[str, Any]]) -> bool:
    return any(row["texts"]["documents"] < LEAST_DOCUMENTS for row in rows)


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def _row(row: dict[str, Any]) -> str:
    inside, last = row["in_window"], row.get("last_window")
    name = f"{row['recipe']} (demonstration)" if row["demonstration"] else row["recipe"]
    losses = [f"{inside[key]:.3f}" for key in ("base", "control", "before", "after")]
    cells = [name, _base(row), f"{row['tokens']:,}", *losses, _interval(inside)]
    cells += [*_lengths(row, "after"), "–" if last is None else _interval(last), _ROUTES[row["route"]]]
    return _line(cells)


def _base(row: dict[str, Any]) -> str:
    return row["base"] if row["measure"] == "next token" else f"{row['base']}, {row['measure']}"


def _interval(found: dict[str, Any]) -> str:
    return f"{found['difference']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"


def _lengths(row: dict[str, Any], name: str) -> list[str]:
    return [f"{found[name]['nll']:.3f}" if name in found else "–" for found in row["lengths"]]


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    notes = [f"- {row['recipe']} is a demonstration: {row['demonstration']}." for row in rows if row["demonstration"]]
    if any(row["measure"] == "1 - cosine" for row in rows):
        notes.append(
            "- 1 - cosine: of the pooled states and those of the unswapped encoder, which reads a longer text window "
            "by window."
        )
    return [*notes, ""] if notes else []


def _plain(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of bases and controls, each once, with the recipes that they belong to."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        for name in ("base", "control"):
            key = (name, _base(row), *_lengths(row, name))
            lines.setdefault(key, []).append(row["recipe"])
    return [
        _line([name if name == "base" else f"control of {', '.join(recipes)}", *cells])
        for (name, *cells), recipes in lines.items()
    ]


def _commands(rows: list[dict[str, Any]]) -> list[str]:
    """Return all commands, bases and controls once, $WORK being a folder of your choice."""
    lines, said = [], set()
    for row in rows:
        for what in ("base", "search", "recipe", "control"):
            command = row["commands"].get(what)
            if command is not None and command not in said:
                said.add(command)
                name = row["base"] if what == "base" else row["recipe"]
                lines.append(f"- {what} {name if what != 'control' else 'of ' + name}: `{command}`")
    return ["$WORK is a folder of your choice.", "", *lines]
