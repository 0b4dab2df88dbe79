"""The sections of the page about lengths and positions. Each is built from results.json, or None without data.

A section's title states its subject, and its lead explains how to read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hf_posswap.plotting.styles import SLIDING
from hf_posswap.report.charts import Axes, Dot, Line, line_chart
from hf_posswap.report.conclusion import percent
from hf_posswap.report.differences import differences_of, finding
from hf_posswap.report.looks import model_numbers
from hf_posswap.report.markup import Markup, tag
from hf_posswap.report.words import far_change, scores_by_length

Results = dict[str, Any]
Rows = Sequence[dict[str, Any]]
_SLIDING_READS = (
    " The sliding window is the baseline without a longer reach: half-overlapping windows of the original size. A swap "
    "pays off where it is below that baseline."
)
_FIRST_POSITION = 16  # the loss of a document's first tokens would dominate the scale


def section(identity: str, title: str, lead: str, *content: Markup) -> Markup:
    """Return a section with its heading and a sentence that explains how to read it."""
    return tag("section", tag("h2", title), tag("p", lead, class_="lead"), *content, id=identity)


def lines_of(
    results: Results, rows_of: Callable[[dict[str, Any]], Rows], x: str, y: str, *, interval: bool = True
) -> list[Line]:
    """Return a line for each model that has rows.

    Args:
        results: the results of the evaluation.
        rows_of: returns the rows of a model.
        x: the rows' field for the x axis.
        y: the rows' field for the y axis.
        interval: whether rows have an interval, in "low" and "high".
    """
    ends, numbers = ("low", "high") if interval else (), model_numbers(results)
    return [
        Line(name, numbers[name], tuple(Dot(row[x], row[y], *(row[end] for end in ends)) for row in rows))
        for name, model in results["models"].items()
        if (rows := rows_of(model))
    ]


def sliding_line(results: Results, metric: str, x: str, y: str) -> list[Line]:
    """Return the line of the sliding window, or no line if it was not measured; x and y as in `lines_of`."""
    sliding = results.get("sliding")
    if not sliding:
        return []
    rows: Rows = sliding["ppl_prefix"] if metric == "ppl_prefix" else _position_rows(sliding)
    return [Line(sliding["name"], SLIDING, tuple(Dot(r[x], r[y], r["low"], r["high"]) for r in rows))]


def difference(results: Results) -> Markup | None:
    """Return the paired difference of each model from the baseline by length."""
    differences = differences_of(results)
    if differences is None:
        return None
    numbers = model_numbers(results)
    lines = [
        Line(name, numbers[name], tuple(Dot(row["length"], row["difference"], row["low"], row["high"]) for row in rows))
        for name, rows in differences.rows.items()
    ]
    axes = Axes(
        "tokens read",
        "difference, nats per token (right: perplexity)",
        window=results["window"],
        zero=True,
        name_x=lambda x: f"{x:,.0f} tokens, from {differences.baseline}",
        name_y=lambda y: f"{y:+.3f} nats ({percent(y)})",
        right=lambda y: percent(y) if y else "0 %",
        zero_name=differences.baseline,
    )
    lead = (
        f"Each model's loss minus that of {differences.baseline} on the same documents, paired document by document; "
        "below zero is better. Bands: 95 % intervals over documents."
        + (_SLIDING_READS if results.get("sliding") else "")
    )
    return section("difference", finding(results), lead, line_chart(lines, axes))


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
    token_kind = "first" if any(model.get("ppl_prefix") for model in results["models"].values()) else "masked"
    lead = (
        f"Perplexity of each model on the {token_kind} tokens of the same documents; lower is better. A rise beyond "
        "the original window means that the model breaks there. Bands: 95 % intervals over documents. All models read "
        "the same documents, so differences between models are more certain than the bands suggest: see the chart "
        "above." + (_SLIDING_READS if results.get("sliding") else "")
    )
    return section("perplexity", "Perplexity by length", lead, line_chart(lines, axes), *stops)


def positions(results: Results) -> Markup | None:
    """Return loss by position."""
    lines = lines_of(results, _position_rows, "middle", "loss")
    if not lines:
        return None
    lines += sliding_line(results, "nll_pos", "middle", "loss")
    models = [*results["models"].values(), *filter(None, [results.get("sliding")])]
    names = {row["middle"]: row["label"] for model in models for row in _position_rows(model)}
    axes = Axes(
        "position in the document",
        "loss, nats per token",
        window=results["window"],
        name_x=lambda x: names[x],
        name_y=lambda y: f"{y:.3f}",
    )
    lead = "The loss by position in the document. The part beyond the window shows how well far positions work."
    return section("positions", "Loss by position", lead, line_chart(lines, axes))


def _position_rows(model: dict[str, Any]) -> Rows:
    rows = model.get("nll_pos") or model.get("mlm_pos", {}).get("positions", [])
    selected = [row for row in rows if row["start"] >= _FIRST_POSITION] or rows
    return [
        row
        | {
            "middle": (max(row["start"], 0.5) * row["stop"]) ** 0.5,
            "label": f"tokens {row['start']:,} to {row['stop'] - 1:,}",
        }
        for row in selected
    ]


def gain(results: Results) -> Markup | None:
    """Return the change of the loss by longer context."""
    lines = lines_of(results, _context_rows, "context", "difference")
    if not lines:
        return None
    rows: Rows = next(model["ctx_gain"] for model in results["models"].values() if model.get("ctx_gain"))
    reference = next((row["context"] for row in rows if row["reference"]), None)
    axes = Axes(
        "tokens of context",
        "change of the loss, nats per token",
        window=reference,
        zero=True,
        name_y=lambda y: f"{y:+.3f}",
        edge="full original window",
    )
    lead = (
        f"The same last {rows[0]['tail']:,} tokens, read with more and more text before them, compared with a full "
        "window. Below zero the text helps, at zero the model ignores it, and above zero it harms. A flat perplexity "
        "alone does not show this."
    )
    return section("gain", "Is far context used?", lead, line_chart(lines, axes))


def _context_rows(model: dict[str, Any]) -> Rows:
    """Return the change of the loss by context, one row per amount of context; negative if the context helps."""
    return [{"context": row["context"]} | far_change(row) for row in model.get("ctx_gain", [])]


def offsets(results: Results) -> Markup | None:
    """Return the change of the loss when a passage is moved."""
    lines = lines_of(results, lambda model: model.get("offset_probe", []), "offset", "change")
    if not lines:
        return None
    axes = Axes(
        "position of the first token",
        "change, nats per token",
        window=results["window"],
        zero=True,
        log_x=False,
        name_x=lambda x: f"starting at {x:,.0f}",
        name_y=lambda y: f"{0.0 if abs(y) < 5e-7 else y:+.3g}",
    )
    lead = (
        "One passage, read at several positions without context. If only distances matter, the loss does not change: a "
        "line at zero."
    )
    return section("offsets", "The same text at other positions", lead, line_chart(lines, axes))


def retrieval(results: Results) -> Markup | None:
    """Return how often a question finds its document, for encoders."""
    lines = lines_of(results, lambda model: model.get("retrieval", []), "length", "accuracy")
    if not lines:
        return None
    axes = Axes("tokens of a document", "share found", window=results["window"], zero=True, name_y=lambda y: f"{y:.0%}")
    lead = "How often the embedding of a question is nearest to that of the document that answers it."
    return section("retrieval", "Retrieval at length", lead, line_chart(lines, axes))
