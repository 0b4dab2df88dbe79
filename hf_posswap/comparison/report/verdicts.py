"""The top of the page: a summary of each model, the table of all models, and the cost within the window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from hf_posswap.comparison.report.conclusion import SIGNIFICANT, conclude, inside_statement, percent
from hf_posswap.comparison.report.looks import look, mark, model_numbers, scheme_name
from hf_posswap.comparison.report.markup import Markup, join, tag
from hf_posswap.comparison.report.results import (
    DifferenceRow,
    ModelEntry,
    Needles,
    Results,
    ShortContext,
    ShortLoss,
    Tasks,
)
from hf_posswap.comparison.report.sections import section
from hf_posswap.comparison.report.tables import Cell, sortable
from hf_posswap.comparison.report.words import (
    TASKS_KEPT,
    effective,
    far_change,
    far_statement,
    kept_text,
    length_change,
    near_said,
    number,
    own_gaps,
    retrieved_said,
    scores_by_length,
    share_found,
    task_scores,
    times,
    with_tasks_kept,
)
from hf_posswap.plotting.styles import SLIDING
from hf_posswap.utils.format import interval_text

_MARKS = {"not worse": "good", "worse": "bad"}
_VERDICT_MARKS = {"worth it": "good", "worth it beyond the window": "good", "not yet": "bad"}


def findings(results: Results) -> Markup:
    """Return a card for each model that summarizes its results."""
    numbers = model_numbers(results)
    cards = [_card(results, numbers[name], name, model) for name, model in results["models"].items()]
    return tag("section", tag("h2", "In short"), tag("div", *cards, class_="cards"), id="findings")


def _card(results: Results, number_of_model: int, name: str, model: ModelEntry) -> Markup:
    conclusion = conclude(results, name)
    sentences = [_long(results, model), inside_statement(results, name), *_changes(results, name)]
    sentences.append(far_statement(model))
    if model.get("passkey"):
        sentences.append(effective(model["passkey"], results["window"]))
    if model.get("retrieval"):
        sentences.append(retrieved_said(model["retrieval"]))
    if model.get("vectors"):
        sentences.append(near_said(model["vectors"]))
    sentences += [f"{metric} was not measured: {why}" for metric, why in own_gaps(results, model)]
    baseline_note = "the baseline" if name == results["base"] and len(results["models"]) > 1 else None
    plan = model["plan"]
    mechanism = None if plan is None else f"{scheme_name(plan['scheme'])}, {plan['route']} route"
    subtitle = "; ".join(filter(None, [mechanism, baseline_note]))
    title = tag("h3", mark(number_of_model), name, subtitle and tag("small", subtitle))
    css_class = conclusion and f"conclusion {_VERDICT_MARKS.get(conclusion.verdict, 'open')}"
    first = conclusion and tag("p", conclusion.text, class_=css_class)
    return tag("article", title, first, tag("ul", *(tag("li", text) for text in sentences if text)), class_="card")


def _long(results: Results, model: ModelEntry) -> str | None:
    rows = scores_by_length(model)
    if not rows:
        return None
    last = rows[-1]
    multiple = times(last["length"], results["window"])
    sentence = f"Perplexity {number(last['perplexity'])} at {last['length']:,} tokens" + (
        f", {multiple}" if multiple else ""
    )
    first = next((row for row in rows if row["length"] == results["window"]), rows[0])
    if first is not last:
        sentence += f" ({number(first['perplexity'])} at {first['length']:,})"
    return f"{sentence}."


def _changes(results: Results, name: str) -> list[str]:
    """Return the model's differences from the base at the longest common length, and in needles."""
    comparison, base = results["comparisons"].get(name, {}), results["base"]
    short = results["models"][name].get("short_reg")
    last = [row for row in comparison.get("lengths", [])[-1:] if row["length"] != (short and short.get("length"))]
    sentences = [length_change(row, base) for row in last]
    needles = comparison.get("passkey")
    if needles:
        certainty = f"p = {needles['p']:.2g}" if needles["p"] <= 0.05 else f"not significant, p = {needles['p']:.2g}"
        sentences.append(
            f"{needles['after']} of {needles['needles']} passkeys found, {base} {needles['before']} ({certainty})."
        )
    sentences += [
        f"Tasks at {row['length']:,} tokens: {row['score']:.0%}, {base} {row['base_score']:.0%}; "
        f"kept: {kept_text(row)}."
        for row in comparison.get("ruler_lite", [])
    ]
    return sentences


def overview(results: Results) -> Markup | None:
    """Return the sortable table of the main numbers."""
    models, with_kept = results["models"], with_tasks_kept(results)
    columns: list[tuple[str, list[Cell]]] = []
    if any(scores_by_length(model) for model in models.values()):
        lengths = [(f"{n:,} tokens", n) for n in results["lengths"]]
        columns += [(title, [_perplexity(model, n) for model in models.values()]) for title, n in lengths]
    for title, metric, write in _COLUMNS:
        if any(model.get(metric) for model in with_kept.values()):
            cells = [write(model[metric]) if model.get(metric) else Cell("–") for model in with_kept.values()]
            columns.append((title, cells))
    if not columns:
        return None
    numbers = model_numbers(results)
    rows = [(numbers[name], name, [cells[n] for _, cells in columns]) for n, name in enumerate(models)]
    if sliding := results.get("sliding"):
        shown = [_perplexity(sliding | {"cannot_run": {}}, n) for n in results["lengths"]]
        rows.append((SLIDING, sliding["name"], shown + [Cell("–")] * (len(columns) - len(shown))))
    lead = "Columns of token counts: perplexity at that length with its 95 % interval. Click a heading to sort."
    return section("overview", "All numbers at a glance", lead, sortable([title for title, _ in columns], rows))


def _perplexity(model: ModelEntry, length: int) -> Cell:
    row = next((row for row in scores_by_length(model) if row["length"] == length), None)
    if row is None:
        return Cell("–", None, model["cannot_run"].get(str(length)))
    return Cell(number(row["perplexity"]), row["perplexity"], interval_text(row, number))


def _short(short: ShortContext) -> Cell:
    return Cell(f"{short['loss']['difference']:+.3f}", short["loss"]["difference"], short["loss"]["verdict"])


def _effective(passkey: Needles) -> Cell:
    length = passkey["effective_length"]["length"]
    return Cell("no verdict") if length is None else Cell(f"{length:,}", length)


def _tasks(ruler: Tasks) -> Cell:
    length, score = list(task_scores(ruler).items())[-1]
    return Cell(f"{score:.0%}", score, f"at {length:,}")


def _last(name: str, form: str, rows: Sequence[Mapping[str, float]]) -> Cell:
    """Return the number `name` of the longest length, written in `form`."""
    last = rows[-1]
    return Cell(form.format(last[name]), last[name], f"at {last['length']:,}")


def _sliding(rows: Sequence[DifferenceRow]) -> Cell:
    last = rows[-1]
    is_significant = last["p_holm"] is not None and last["p_holm"] <= SIGNIFICANT
    verdict = ("below" if last["difference"] < 0 else "above") if is_significant else "no significant difference"
    change = percent(last["difference"])
    return Cell(f"{last['difference']:+.3f}", last["difference"], f"{change}, {verdict} at {last['length']:,}")


_COLUMNS = (
    (
        "change by far context, nats",
        "far_context",
        lambda far: Cell(f"{(change := far_change(far)['difference']):+.3f}", change, far["verdict"]),
    ),
    ("minus the sliding window, nats", "against_sliding", _sliding),
    ("within the window, nats", "short_reg", _short),
    ("tasks, mean score", "ruler_lite", _tasks),
    (
        "tasks kept of the baseline's",
        TASKS_KEPT,
        lambda rows: Cell(kept_text(rows[-1]), rows[-1]["kept"], f"at {rows[-1]['length']:,}"),
    ),
    ("passkeys found", "passkey", lambda passkey: Cell(f"{share_found(passkey):.0%}", share_found(passkey))),
    ("effective length", "passkey", _effective),
    ("documents found", "retrieval", partial(_last, "accuracy", "{:.0%}")),
    ("near the base, cosine", "vectors", partial(_last, "cosine", "{:.3f}")),
    ("read, tokens/s", "cost", partial(_last, "tokens_per_second", "{:,.0f}")),
)


def short_context(results: Results) -> Markup | None:
    """Return the cost of each swap within the window, as a chart and as text."""
    verdicts = {name: model["short_reg"] for name, model in results["models"].items() if model.get("short_reg")}
    if not verdicts:
        return None
    margin = next(iter(verdicts.values()))["loss"]["margin"]
    edges = [v for short in verdicts.values() for v in _bar(short["loss"])] + [0.0, margin]
    low, room = min(edges), (max(edges) - min(edges)) * 1.1 or 1.0
    low -= room * 0.05
    numbers = model_numbers(results)
    rows = [
        _interval(numbers[name], name, short, inside_statement(results, name), margin, low, room)
        for name, short in verdicts.items()
    ]
    lead = (
        f"The change of the loss from {results['base']} within the original window; further left is better. The bar is "
        f'the interval over documents; it must end before the dashed line, {margin:g} nats per token, for "not worse".'
    )
    return section("short", "Within the original window", lead, tag("div", *rows, class_="forest"))


def _interval(
    number_of_model: int,
    name: str,
    short: ShortContext,
    statement: str | None,
    margin: float,
    low: float,
    room: float,
) -> Markup:
    loss = short["loss"]

    def at(value: float) -> str:
        return f"{100 * (value - low) / room:.2f}%"

    first, last = _bar(loss)
    width = f"{100 * (last - first) / room:.2f}%"
    track = join(
        tag("span", class_="at-zero", style=f"left:{at(0.0)}"),
        tag("span", class_="at-margin", style=f"left:{at(margin)}"),
        tag("span", class_=f"bar {look(number_of_model)}", style=f"left:{at(first)};width:{width}"),
        tag("span", class_=f"point {look(number_of_model)}", style=f"left:{at(loss['difference'])}"),
    )
    more = (
        f"Both have the same argmax for {short['agreement']:.0%} of the tokens; KL divergence "
        f"{short['divergence']:.3g} nats per token."
    )
    verdict = tag("b", loss["verdict"], class_=f"verdict {_MARKS.get(loss['verdict'], 'open')}")
    head = tag("div", tag("span", mark(number_of_model), name), verdict, class_="who")
    sentence = tag("p", f"{statement} {more}")
    return tag("div", head, tag("div", track, class_="track"), sentence, class_="row")


def _bar(loss: ShortLoss) -> tuple[float, float]:
    """Return the ends of a change's interval, or the change itself without an interval."""
    return (
        loss["difference"] if loss["lower"] is None else loss["lower"],
        loss["difference"] if loss["upper"] is None else loss["upper"],
    )
