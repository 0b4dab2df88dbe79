"""The sections about a model: its positions, the plan, the cost of lengths, serving programs, commands."""

from __future__ import annotations

from collections.abc import Iterable

from hf_posswap.advice.serving import Serving
from hf_posswap.explorer.model import ModelFacts
from hf_posswap.patching.plan.text import EDIT_HEADER
from hf_posswap.report.markup import Markup, tag
from hf_posswap.utils.format import human_bytes


def about_model(facts: ModelFacts) -> list[Markup]:
    """Return the sections about the model, without empty ones."""
    explanation = facts.explanation
    sections = [tag("section", tag("h2", "The model"), _pairs(explanation.report.rows()), id="model")]
    if explanation.plan is not None or explanation.refusal is not None or explanation.schemes:
        sections.append(_plan(facts))
    sections.append(_costs(facts))
    if facts.serving:
        sections.append(_serving(facts))
    commands = tag("pre", "\n".join(facts.commands), class_="commands", tabindex=0)
    return [*sections, tag("section", tag("h2", "Next commands"), commands, id="commands")]


def _plan(facts: ModelFacts) -> Markup:
    explanation = facts.explanation
    if explanation.refusal is not None:
        return tag(
            "section", tag("h2", "The swap"), tag("p", f"refused: {explanation.refusal}", class_="warning"), id="plan"
        )
    if explanation.plan is None:
        rows = [[name, result] for name, result in explanation.schemes.items()]
        return tag("section", tag("h2", "Each scheme in this model"), _table(("scheme", "in it"), rows), id="plan")
    edits = tag("div", _table(EDIT_HEADER, [list(row) for row in explanation.plan.edit_rows()]), class_="scroll")
    title = tag("p", explanation.plan.title, class_="lead")
    return tag("section", tag("h2", "The swap"), title, edits, _pairs(explanation.plan.fact_rows()), id="plan")


def _costs(facts: ModelFacts) -> Markup:
    rows = [
        [f"{cost.length:,}", human_bytes(cost.cache), human_bytes(cost.forward), f"{cost.operations / 1e12:,.3g} T"]
        for cost in facts.costs
    ]
    head = ("tokens", "keys and values", "a forward, at most", "operations")
    note = (
        "For one text, beyond the weights, in the precision of the config. The memory of a forward of all tokens is an "
        "upper bound by the formula; kernels need less. Operations are those of one forward. Computed from the shapes, "
        "not measured."
    )
    table = tag("div", _table(head, rows, numbers=True), class_="scroll")
    return tag("section", tag("h2", "Cost by length"), tag("p", note, class_="note"), table, id="costs")


def _serving(facts: ModelFacts) -> Markup:
    rows = [
        [
            serving.target,
            tag("span", serving.verdict, class_=f"verdict {serving.verdict}"),
            tag("span", _why(serving), tag("small", f" {serving.known}")),
        ]
        for serving in facts.serving
    ]
    heading = "Which programs support it" if facts.explanation.plan is None else "Which programs support the result"
    return tag("section", tag("h2", heading), _table(("program", "verdict", "why, and known from"), rows), id="serving")


def _why(serving: Serving) -> str:
    return f"as a {serving.converted}, by posswap to-native: {serving.why}" if serving.converted else serving.why


def _pairs(rows: Iterable[tuple[str, str]]) -> Markup:
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in rows))


def _table(head: Iterable[str], rows: Iterable[Iterable[object]], *, numbers: bool = False) -> Markup:
    css_class = "number" if numbers else None
    top = tag("tr", *(tag("th", name, scope="col", class_=css_class) for name in head))
    body = [tag("tr", *(tag("td", cell, class_=css_class) for cell in row)) for row in rows]
    return tag("table", tag("thead", top), tag("tbody", *body), class_="plain")
