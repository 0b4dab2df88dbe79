"""The sections of the page about lengths and positions: each from what results.json holds, or None where it holds none.

A section is named by what it tells, and says in a sentence how to read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hf_posswap.plotting.styles import SLIDING
from hf_posswap.report.charts import Axes, Dot, Line, line_chart
from hf_posswap.report.markup import Markup, tag
from hf_posswap.report.words import scores_by_length

Results = dict[str, Any]
Rows = Sequence[dict[str, Any]]
_SLIDING_READS = (
    " The sliding window is what needs no longer reach at all: half-overlapping windows of the original size. A swap "
    "is worth its reach where its line is below that one."
)
_FIRST_POSITION = 16  # the first tokens of a document cost so much that they would flatten all else


def section(identity: str, title: str, lead: str, *content: Markup) -> Markup:
    """Return a section with its heading and the sentence that says how to read it."""
    return tag("section", tag("h2", title), tag("p", lead, class_="lead"), *content, id=identity)


def lines_of(
    results: Results, rows_of: Callable[[dict[str, Any]], Rows], x: str, y: str, *, interval: bool = True
) -> list[Line]:
    """Return a line for each model that has rows.

    Args:
        results: of which the models are taken.
        rows_of: what gives the rows of a model.
        x: their field for the x axis.
        y: their field for the y axis.
        interval: whether they have one, in "low" and "high".
    """
    ends = ("low", "high") if interval else ()
    return [
        Line(name, number, tuple(Dot(row[x], row[y], *(row[end] for end in ends)) for row in rows))
        for number, (name, model) in enumerate(results["models"].items())
        if (rows := rows_of(model))
    ]


def sliding_line(results: Results, metric: str, x: str, y: str) -> list[Line]:
    """Return the line of the sliding window, or none where it was not measured: rows, and x and y as in `lines_of`."""
    sliding = results.get("sliding")
    if not sliding:
        return []
    rows: Rows = sliding["ppl_prefix"] if metric == "ppl_prefix" else _position_rows(sliding)
    return [Line(sliding["name"], SLIDING, tuple(Dot(r[x], r[y], r["low"], r["high"]) for r in rows))]


def perplexity(results: Results) -> Markup | None:
    """Return perplexity by length."""
    lines = lines_of(results, scores_by_length, "length", "perplexity")
    if not lines:
        return None
    lines += sliding_line(results, "ppl_prefix", "length", "perplexity")
    stops = [
        tag("p", f"{name}: {next(iter(model['cannot_run'].values()))}, so it has no number beyond.", class_="note")
        for name, model in results["models"].items()
        if model["cannot_run"]
    ]
    axes = Axes("tokens read", "perplexity", log_y=True, window=results["window"])
    what = "first" if any(model.get("ppl_prefix") for model in results["models"].values()) else "masked"
    lead = (
        f"How surprised each model is by the {what} tokens of the same documents; lower is better. A line that rises "
        "behind the original window is a model that breaks there. Bands: 95 % intervals over documents; all models "
        "read the same ones, so that differences between them are surer than the bands suggest."
        + (_SLIDING_READS if results.get("sliding") else "")
    )
    return section("perplexity", "Perplexity by length", lead, line_chart(lines, axes), *stops)


def positions(results: Results) -> Markup | None:
    """Return loss by position."""
    lines = lines_of(results, _position_rows, "middle", "loss")
    if not lines:
        return None
    lines += sliding_line(results, "nll_pos", "middle", "loss")
    held = [*results["models"].values(), *filter(None, [results.get("sliding")])]
    names = {row["middle"]: row["said"] for model in held for row in _position_rows(model)}
    axes = Axes(
        "position in the document",
        "loss, nats a token",
        window=results["window"],
        name_x=lambda x: names[x],
        name_y=lambda y: f"{y:.3f}",
    )
    lead = "Where in a document the loss arises. The part behind the window shows how well far positions work."
    return section("positions", "Loss by position", lead, line_chart(lines, axes))


def _position_rows(model: dict[str, Any]) -> Rows:
    rows = model.get("nll_pos") or model.get("mlm_pos", {}).get("positions", [])
    kept = [row for row in rows if row["start"] >= _FIRST_POSITION] or rows
    return [
        row
        | {
            "middle": (max(row["start"], 0.5) * row["stop"]) ** 0.5,
            "said": f"tokens {row['start']:,} to {row['stop'] - 1:,}",
        }
        for row in kept
    ]


def gain(results: Results) -> Markup | None:
    """Return what further context is worth."""
    lines = lines_of(results, lambda model: model.get("ctx_gain", []), "context", "gain")
    if not lines:
        return None
    rows: Rows = next(model["ctx_gain"] for model in results["models"].values() if model.get("ctx_gain"))
    reference = next((row["context"] for row in rows if row["reference"]), None)
    axes = Axes(
        "tokens of context",
        "gain, nats a token",
        window=reference,
        zero=True,
        name_y=lambda y: f"{y:+.3f}",
        edge="full original window",
    )
    lead = (
        f"The same last {rows[0]['tail']:,} tokens, read with more and more text before them. Above zero the further "
        "text helps; a model that ignores it stays at zero, and one that is hurt by it falls below. A flat perplexity "
        "alone does not show this."
    )
    return section("gain", "Is far context used?", lead, line_chart(lines, axes))


def offsets(results: Results) -> Markup | None:
    """Return the change of the loss when a passage is moved."""
    lines = lines_of(results, lambda model: model.get("offset_probe", []), "offset", "change")
    if not lines:
        return None
    axes = Axes(
        "position of the first token",
        "change, nats a token",
        window=results["window"],
        zero=True,
        log_x=False,
        name_x=lambda x: f"starting at {x:,.0f}",
        name_y=lambda y: f"{0.0 if abs(y) < 5e-7 else y:+.3g}",
    )
    lead = (
        "One passage, read at other positions with nothing before it. Where only distances matter it costs the same "
        "everywhere: a line at zero."
    )
    return section("offsets", "The same text elsewhere", lead, line_chart(lines, axes))


def retrieval(results: Results) -> Markup | None:
    """Return how often a question finds its document, for encoders."""
    lines = lines_of(results, lambda model: model.get("retrieval", []), "length", "accuracy")
    if not lines:
        return None
    axes = Axes("tokens of a document", "share found", window=results["window"], zero=True, name_y=lambda y: f"{y:.0%}")
    lead = "How often the embedding of a question is nearest to that of the document that answers it."
    return section("retrieval", "Retrieval at length", lead, line_chart(lines, axes))
