"""The sections of the page about lengths and positions, needles, tasks, protocols, cost and method.

Each is built from results.json, or None without data. A section's title states its subject, and its lead explains how
to read it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hf_posswap.comparison.report.charts import Axes, Dot, Line, line_chart
from hf_posswap.comparison.report.conclusion import percent
from hf_posswap.comparison.report.looks import look, mark, model_numbers
from hf_posswap.comparison.report.markup import Markup, tag
from hf_posswap.comparison.report.results import HarnessRow, ModelEntry, NeedleCell, Needles, Results, TaskCell
from hf_posswap.comparison.report.tables import Cell, heat_maps, sortable
from hf_posswap.comparison.report.words import (
    differences_of,
    effective,
    far_change,
    finding,
    losses_by_position,
    number,
    scores_by_length,
)
from hf_posswap.plotting.styles import SLIDING

Rows = Sequence[Mapping[str, Any]]
_SLIDING_READS = (
    " The sliding window is the baseline without a longer reach: half-overlapping windows of the original size. A swap "
    "pays off where it is below that baseline."
)
_FIRST_POSITION = 16  # the loss of a document's first tokens would dominate the scale
_VERSIONS = ("hf_posswap", "transformers", "torch", "python")


def section(identity: str, title: str, lead: str, *content: Markup) -> Markup:
    """Return a section with its heading and a sentence that explains how to read it."""
    return tag("section", tag("h2", title), tag("p", lead, class_="lead"), *content, id=identity)


def lines_of(
    results: Results, rows_of: Callable[[ModelEntry], Rows], x: str, y: str, *, interval: bool = True
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


def _position_rows(model: ModelEntry) -> Rows:
    rows = losses_by_position(model)
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
    lines = lines_of(  # negative if the context helps
        results,
        lambda model: [{"context": row["context"]} | far_change(row) for row in model.get("ctx_gain", [])],
        "context",
        "difference",
    )
    if not lines:
        return None
    rows: Rows = next(model["ctx_gain"] for model in results["models"].values() if model.get("ctx_gain"))
    reference = next((row["context"] for row in rows if row["reference"]), None)
    is_full = reference is None or reference + rows[0]["tail"] >= results["window"]  # else only shorter texts were read
    axes = Axes(
        "tokens of context",
        "change of the loss, nats per token",
        window=reference,
        zero=True,
        name_y=lambda y: f"{y:+.3f}",
        edge="full original window" if is_full else "compared with this",
    )
    compared_with = "a full window" if is_full else f"{reference:,} tokens before them"
    lead = (
        f"The same last {rows[0]['tail']:,} tokens, read with more and more text before them, compared with "
        f"{compared_with}. Below zero the text helps, at zero the model ignores it, and above zero it harms. A flat "
        "perplexity alone does not show this."
    )
    return section("gain", "Is far context used?", lead, line_chart(lines, axes))


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


def needles(results: Results) -> Markup | None:
    """Return the passkey grids side by side, and the effective lengths."""
    passkeys = {name: model["passkey"] for name, model in results["models"].items() if model.get("passkey")}
    if not passkeys:
        return None
    numbers = model_numbers(results)
    trials = next(iter(passkeys.values()))["trials"]
    lengths = sorted({cell["length"] for grid in passkeys.values() for cell in grid["cells"]})
    maps = {name: {(c["depth"], c["length"]): _passkey(c) for c in grid["cells"]} for name, grid in passkeys.items()}
    grids = heat_maps(maps, numbers, lengths, results["window"], lambda depth: f"{100 * depth:g} %")
    lead = (
        f"A number is hidden in filler, at a depth from the start (0 %) to the end (100 %), and requested at the end. "
        f"Each cell: percentage of {trials} keys found. The line marks the original window."
    )
    return section("needles", "Is a hidden number found?", lead, grids, _reach(results, numbers, passkeys))


def _passkey(cell: NeedleCell) -> tuple[float, str]:
    lines = [
        f"{cell['share']:.0%} found, 95 % interval {cell['low']:.0%} to {cell['high']:.0%}",
        f"loss of the answer {cell['answer_nll']:.3g} nats per token",
    ]
    title = f"{cell['length']:,} tokens, depth {100 * cell['depth']:g} %"
    return cell["share"], json.dumps([title, [[None, "", text] for text in lines]])


def _reach(results: Results, numbers: dict[str, int], passkeys: dict[str, Needles]) -> Markup:
    """Return the effective lengths as bars, or only as text if no model has one."""
    reasons = {name: effective(grid, results["window"]) for name, grid in passkeys.items()}
    if all(grid["effective_length"]["length"] is None for grid in passkeys.values()):
        texts = dict.fromkeys(reasons.values()) if len(set(reasons.values())) == 1 else map(": ".join, reasons.items())
        return tag("div", tag("h3", "Effective length"), *(tag("p", text) for text in texts), id="effective")
    longest = max(results["lengths"])
    rows = []
    for name, grid in passkeys.items():
        length = grid["effective_length"]["length"]
        width = None if length is None else f"left:0;width:{100 * length / longest:.2f}%"
        bar = width and tag("span", class_=f"bar {look(numbers[name])}", style=width)
        edge = tag("span", class_="at-margin", style=f"left:{min(100.0, 100 * results['window'] / longest):.2f}%")
        text_line = tag("p", reasons[name])
        rows.append(
            tag(
                "div",
                tag("div", tag("span", mark(numbers[name]), name), class_="who"),
                tag("div", bar, edge, class_="track"),
                text_line,
                class_="row",
            )
        )
    title = tag("h3", "Effective length")
    lead = tag("p", "Length up to which a model keeps its base accuracy; dashed: the original window.", class_="lead")
    return tag("div", title, lead, *rows, class_="forest", id="effective")


def tasks(results: Results) -> Markup | None:
    """Return the scores of ruler_lite by task and length."""
    cells_by_model = {
        name: model["ruler_lite"]["cells"] for name, model in results["models"].items() if model.get("ruler_lite")
    }
    if not cells_by_model:
        return None
    numbers = model_numbers(results)
    lengths = sorted({cell["length"] for cells in cells_by_model.values() for cell in cells})
    maps = {name: {(c["task"], c["length"]): _task(c) for c in cells} for name, cells in cells_by_model.items()}
    grids = heat_maps(maps, numbers, lengths, results["window"], lambda task: task.replace("_", " "))
    return section(
        "tasks", "Tasks at length", "Mean score in percent by task and length; hatched: does not fit.", grids
    )


def _task(cell: TaskCell) -> tuple[float, str]:
    score_text = f"{cell['score']:.0%} over {cell['prompts']} prompts"
    return cell["score"], json.dumps([f"{cell['task']}, {cell['length']:,} tokens", [[None, "", score_text]]])


def harness(results: Results) -> Markup | None:
    """Return the scores of the evaluation harness by task and length, as `posswap report --lm-eval` attaches them."""
    tables = results.get("lm_eval")
    if not tables:
        return None
    numbers = model_numbers(results)
    columns = sorted(
        {column for table in tables.values() for column in table["columns"]},
        key=lambda column: math.inf if column == "all" else int(column),
    )
    rows = []
    for row_key in dict.fromkeys((row["task"], row["metric"]) for table in tables.values() for row in table["rows"]):
        for name, table in tables.items():
            for row in (row for row in table["rows"] if (row["task"], row["metric"]) == row_key):
                scores = [_score(row, column, kept=table["kept"]) for column in columns]
                reached = [_reached(row, criterion) for criterion in ("ruler", "nolima")]
                rows.append((numbers[name], name, [Cell(row["task"]), Cell(row["metric"]), *scores, *reached]))
    titles = ["all lengths" if column == "all" else f"{int(column):,}" for column in columns]
    lead = (
        "Scores of EleutherAI's harness by length in tokens; kept: percentage of the baseline's score. Effective "
        "length: up to which every score is at least 0.856 (RULER), or 85 % of the score at the shortest length "
        "(NoLiMa)."
    )
    sorted_rows = sortable(["task", "metric", *titles, "RULER length", "NoLiMa length"], rows)
    return section("harness", "Tasks of the harness", lead, sorted_rows)


def _score(row: HarnessRow, column: str, *, kept: bool) -> Cell:
    cell, share = row["values"].get(column), (row.get("retention") or {}).get(column)
    if cell is None:
        return Cell("–")
    return Cell(number(cell["score"]), cell["score"], f"{share:.0f} % kept" if kept and share is not None else None)


def _reached(row: HarnessRow, criterion: str) -> Cell:
    effective = row["effective_length"]
    if effective is None:
        return Cell("–")
    measured = sorted(int(column) for column in row["values"] if column != "all")
    length = effective[criterion]
    if length is None:  # NoLiMa's criterion has no meaning where nothing is right at the shortest length
        return Cell(f"< {measured[0]:,}", 0) if criterion == "ruler" else Cell("–")
    return Cell(f"≥ {length:,}" if length == measured[-1] else f"{length:,}", length)


def cost(results: Results) -> Markup | None:
    """Return the cost of each length: prefill, decoding, and memory for keys and values."""
    measured = lines_of(results, lambda model: model.get("cost", []), "length", "tokens_per_second", interval=False)
    if not measured:
        return None
    window, x = results["window"], "tokens read"
    decode = lines_of(results, lambda model: model.get("cost", []), "length", "decode_seconds", interval=False)
    thousandths = [Line(d.name, d.number, tuple(Dot(dot.x, 1000 * dot.y) for dot in d.dots)) for d in decode]
    speed = line_chart(measured, Axes(x, "prefill, tokens per second", window=window, zero=True, name_y=number))
    wait = line_chart(thousandths, Axes(x, "decoding, milliseconds per token", window=window, zero=True, name_y=number))
    numbers = model_numbers(results)
    rows = [
        (
            numbers[name],
            name,
            [Cell(f"{row['cache_bytes'] / 2**20:,.1f} MiB", row["cache_bytes"]) for row in model["cost"][-1:]],
        )
        for name, model in results["models"].items()
        if model.get("cost")
    ]
    lead = "Speed of prefill and decoding, measured once on one machine: for orientation only."
    table = sortable(["keys and values at its longest"], rows)
    return section("cost", "Cost", lead, tag("div", speed, wait, class_="pair"), table)


def protocols(results: Results) -> Markup | None:
    """Return perplexities by the protocols of papers, and other single numbers, as one table."""
    columns: dict[str, dict[int, Cell]] = {}
    for index, model in enumerate(results["models"].values()):
        for row in model.get("ppl_compat", []):
            columns.setdefault(row["protocol"], {})[index] = Cell(number(row["perplexity"]), row["perplexity"])
        if model.get("longppl"):
            value = model["longppl"]["perplexity"]
            columns.setdefault("longppl", {})[index] = Cell(number(value), value)
        for pseudo in model.get("pseudo_ppl", []):
            title = f"pseudo-perplexity, {pseudo['length']:,} tokens"
            columns.setdefault(title, {})[index] = Cell(number(pseudo["perplexity"]), pseudo["perplexity"])
    if not columns:
        return None
    numbers = model_numbers(results)
    rows = [
        (numbers[name], name, [cells.get(index, Cell("–")) for cells in columns.values()])
        for index, name in enumerate(results["models"])
        if any(index in cells for cells in columns.values())
    ]
    lead = "Perplexity by the protocols of other projects. Do not compare numbers of different columns."
    return section("protocols", "Perplexity by other protocols", lead, sortable(list(columns), rows))


def method(results: Results) -> Markup:
    """Return how the results were measured, and a link to save them."""
    data, settings = results["data"], results["settings"]
    identity = next(iter(results["models"].values()))["identity"]
    run, provenance, sliding = results["environment"], results.get("made", {}), results.get("sliding")
    facts = {
        "baseline": results["base"],
        "original window": f"{results['window']:,} tokens" if results["window"] else "not known",
        "sliding window": sliding and f"{sliding['of']}, windows of {sliding['window']:,}, {sliding['stride']:,} apart",
        "text": f"{data['source']}: {data['documents']} documents, digest {data['digest'][:16]}",
        "documents": data.get("protocol", {}).get("said"),
        "tokenizer": f"{data['tokenizer']['class']}, {data['tokenizer']['vocabulary']:,} tokens",
        "metrics": ", ".join(results["metrics"]),
        "seed": settings["seed"],
        "run as": f"{identity['dtype']}, {identity['attention']} attention, on {identity['device']}",
        "versions": ", ".join(f"{key} {run[key]}" for key in _VERSIONS if key in run),
        "machine": ", ".join(str(run[key]) for key in ("system", "processor", "gpu") if key in run),
        "made": provenance.get("date"),
        "command": provenance.get("command"),
    }
    swaps = [
        (name, f"{plan['scheme']['name']}, {plan['route']}; {plan['adaptation']}", plan)
        for name, model in results["models"].items()
        if (plan := model["plan"])
    ]
    rows = [tag("div", tag("dt", key), tag("dd", value)) for key, value in facts.items() if value is not None]
    rows += [tag("div", tag("dt", name), tag("dd", text)) for name, text, _ in swaps]
    controls = [(name, model.get("trained")) for name, model in results["models"].items() if not model["plan"]]
    rows += [tag("div", tag("dt", name), tag("dd", f"no swap; {training}")) for name, training in controls if training]
    keep = tag("p", tag("a", "Save results.json", href="#", download="results.json", id="save"), class_="note")
    lead = "Everything that these numbers depend on; results.json contains all of it."
    return section("method", "How it was measured", lead, tag("dl", *rows), keep)
