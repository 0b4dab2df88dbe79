"""The whole page: one HTML file without external resources, whose pictures are drawn by the browser."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from hf_posswap.comparison.report.looks import document, look, mark, shape
from hf_posswap.comparison.report.markup import Markup, json_script, tag
from hf_posswap.errors import OptionError
from hf_posswap.geometry import Geometry
from hf_posswap.inspection.explorer.data import (
    FIRST,
    GROUPS,
    OTHER,
    PRESETS,
    ROTARY,
    SHAPES,
    Choice,
    Shape,
    label,
    page_data,
)
from hf_posswap.inspection.explorer.model import ModelFacts
from hf_posswap.patching.plan.swap_plan import EDIT_HEADER
from hf_posswap.utils.atomic_io import write_text
from hf_posswap.utils.format import human_bytes

PAGE = "positions.html"
"""The default file name of the page."""
SCRIPTS = ("numbers", "data", "colours", "elements", "lines", "maps", "pictures", "controls")
"""The modules of the script, in order of dependency."""
_PICTURES = (
    (
        "wavelengths",
        "Tokens in which a rotary pair completes a turn",
        "A pair that completes no turn within the original window has seen only a part of the circle in training, and "
        "reaches unseen angles beyond the window. Variants of scaled RoPE treat these pairs differently.",
    ),
    (
        "scores",
        "Attention score by distance",
        "The score of a query with an identical key by distance: the effect of positions alone.",
    ),
    (
        "relative",
        "The distances that attention sees",
        "The apparent distance of each query-key pair in tokens of the unswapped model. Left of the dashed line and "
        "below it are pairs farther apart than the original window.",
    ),
    (
        "bias",
        "Bias by query and key",
        "The bias added to the score in the first, a middle and the last head. From -30 down a key has no weight, and "
        "one colour.",
    ),
    (
        "turning",
        "Rotary pairs in the plane",
        "The fastest pair of a query, a middle one and the slowest, dark to light: the fastest at positions 0, 1, 2, "
        "the others over the original window.",
    ),
    (
        "table",
        "Position tables",
        "One row per position, one column per dimension: red is above 0, blue below. Tables of learned rows, which are "
        "random before training, are not drawn.",
    ),
    (
        "similarity",
        "Similarity of positions in a table",
        "The cosine of two rows by their distance. In a tiled table positions one window apart are identical, in a "
        "stretched one neighbours are similar; sinusoids become dissimilar slowly.",
    ),
)


def write_page(path: Path, facts: ModelFacts | None = None, *, geometry: Geometry | None = None) -> None:
    """Write the page to `path` atomically.

    Args:
        path: the .html file.
        facts: as in `render_page`.
        geometry: likewise.

    Raises:
        OptionError: as `render_page`.
        CheckpointError: the file cannot be written.
    """
    write_text(path, render_page(facts, geometry=geometry))


def render_page(facts: ModelFacts | None = None, *, geometry: Geometry | None = None) -> str:
    """Return the page with inline styles, scripts and data.

    Args:
        facts: facts about a model, in whose shape the schemes are drawn; None: the page shows only schemes, in the
            shapes of `SHAPES`.
        geometry: a further shape to draw in, initially the one shown, such as `sample_geometry(heads=4, base=500.0)`.

    Raises:
        OptionError: both are given.

    Example:
        >>> from transformers import GPT2Config
        >>> from hf_posswap.inspection.explorer.model import model_facts
        >>> page = render_page(model_facts(GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=16, vocab_size=9)))
        >>> page.startswith("<!doctype html>"), "Which programs support it" in page
        (True, True)
    """
    if facts is not None and geometry is not None:
        raise OptionError("facts and geometry are given, and each says the shape to draw in: give one of them.")
    title = "Position schemes" if facts is None else f"Positions of {facts.name}"
    lead = (
        "What happens to the positions that a model sees when its text grows beyond its window? Move the slider, or "
        "choose a question."
    )
    shapes = list(SHAPES) if geometry is None else [Shape("your own", geometry), *SHAPES]
    requested, length = None, None
    about = []
    if facts is not None:
        shapes, requested, length = [Shape(facts.name, facts.explanation.report.geometry)], facts.scheme, facts.length
        about = about_model(facts)
    data, choices = page_data(shapes, requested, length)
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    packed = base64.b64encode(zlib.compress(text.encode("utf-8"), 9)).decode("ascii")
    assets = files("hf_posswap.inspection.explorer")
    scripts = [assets.joinpath(f"js/{name}.js").read_text(encoding="utf-8") for name in SCRIPTS]
    pictures = [
        tag(
            "section",
            tag("h2", heading),
            tag("p", note, class_="note"),
            tag("div", class_="place", id=f"place-{name}"),
            tag("ul", class_="said"),
            id=name,
        )
        for name, heading, note in _PICTURES
    ]
    no_script = tag("p", "The pictures are drawn by JavaScript, which is off in this browser.", class_="warning")
    return document(
        title,
        tag("header", tag("h1", title), tag("p", lead, class_="lead")),
        tag("main", *about, _controls(shapes, choices, facts), *pictures),
        tag("noscript", no_script),
        json_script(_settings(shapes, choices, facts), "settings"),
        tag("script", Markup(packed), type="text/plain", id="data"),
        tag("script", Markup("\n".join(scripts))),
        style=Markup(assets.joinpath("page.css").read_text(encoding="utf-8")),
    )


def _settings(shapes: list[Shape], choices: list[Choice], facts: ModelFacts | None) -> dict[str, object]:
    """Return the initial state of the controls, the questions, and the style and the words of each choice."""
    first_shape, chosen, factor = shapes[0], list(FIRST), 4.0
    if facts is not None:
        native, *compared = OTHER if first_shape.geometry.base is None else ROTARY
        chosen = list(dict.fromkeys([native, *([label(facts.scheme)] if facts.scheme is not None else compared)]))
        factor = max(
            1.0, (facts.length or 4 * first_shape.geometry.original_length) / first_shape.geometry.original_length
        )
    drawn = {choice.name: choice for choice in choices if choice.group is not None}
    return {
        "styles": [
            {
                "name": name,
                "look": look(choice.number),
                "shape": shape(choice.number),
                "words": " ".join(choice.sentences),
            }
            for name, choice in drawn.items()
        ],
        "start": {
            "settings": {"shape": first_shape.name, "factor": factor},
            "schemes": [name for name in chosen if name in drawn],
        },
        "presets": [
            {
                "schemes": preset.schemes,
                "settings": {"shape": preset.shape, "factor": 4} if facts is None else {},
                "answer": preset.answer,
            }
            for preset in PRESETS
        ],
    }


def _controls(shapes: list[Shape], choices: list[Choice], facts: ModelFacts | None) -> Markup:
    groups = []
    for group in GROUPS:
        chips = [
            tag(
                "label",
                tag("input", type="checkbox", value=choice.name),
                mark(choice.number),
                choice.name,
                title=choice.summary,
                class_=look(choice.number),
            )
            for choice in choices
            if choice.group == group
        ]
        legend = tag("legend", f"Schemes that {group}" if group != GROUPS[-1] else "Others")
        groups.append(tag("fieldset", legend, tag("div", *chips, class_="chips")))
    undrawn = [tag("li", f"{choice.name}: {choice.reason}") for choice in choices if choice.group is None]
    note = tag("div", "Registered, and not drawn here:", tag("ul", *undrawn), class_="note") if undrawn else None
    slider = tag(
        "div",
        tag("label", "length of the text, in windows", for_="slide-factor"),
        tag("input", type="range", id="slide-factor", min=0, max=1, step=1),
        tag("output", id="length", for_="slide-factor"),
        class_="slider",
    )
    questions = [tag("button", preset.question, type="button") for preset in PRESETS]
    heading = "How long is the text?" if facts is None else "How long is the text, for this model?"
    foot = tag("div", tag("button", "Start again", type="button", id="reset"), tag("p", id="state"), class_="foot")
    return tag(
        "section",
        tag("h2", heading),
        slider,
        tag("div", *questions, id="questions", class_="chips"),
        tag("p", id="answer", aria_live="polite"),
        tag(
            "details",
            tag("summary", "More schemes" if facts is not None else "More schemes, and the shape of the model"),
            tag("div", *groups, id="schemes"),
            _shapes(shapes) if len(shapes) > 1 else None,
            tag("ul", class_="said", id="words"),
            note,
            id="more",
        ),
        foot,
        tag("div", id="refused", aria_live="polite"),
        id="choose",
    )


def _shapes(shapes: list[Shape]) -> Markup:
    """Return the choice of the shape to draw in."""
    chips = []
    for each in shapes:
        size = each.geometry
        turned = "a table" if size.base is None else f"base {size.base:,.10g}"
        text = f"{each.name}: {size.num_heads} heads of {size.head_dim}, window {size.original_length:,}, {turned}"
        chips.append(tag("label", tag("input", type="radio", name="shape", value=each.name), text))
    return tag("fieldset", tag("legend", "Shape of the model"), tag("div", *chips, class_="chips"), id="shapes")


def about_model(facts: ModelFacts) -> list[Markup]:
    """Return the sections about the model, without empty ones."""
    explanation = facts.explanation
    sections = [tag("section", tag("h2", "The model"), _pairs(explanation.report.rows()), id="model")]
    if explanation.plan is not None or explanation.refusal is not None or explanation.schemes:
        sections.append(_plan_section(facts))
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
    sections.append(tag("section", tag("h2", "Cost by length"), tag("p", note, class_="note"), table, id="costs"))
    if facts.serving:
        rows = []
        for serving in facts.serving:
            converted = f"as a {serving.converted}, by posswap to-native: " if serving.converted else ""
            verdict = tag("span", serving.verdict, class_=f"verdict {serving.verdict}")
            why = tag("span", f"{converted}{serving.why}", tag("small", f" {serving.known}"))
            rows.append([serving.target, verdict, why])
        heading = "Which programs support it" if explanation.plan is None else "Which programs support the result"
        table = _table(("program", "verdict", "why, and known from"), rows)
        sections.append(tag("section", tag("h2", heading), table, id="serving"))
    commands = tag("pre", "\n".join(facts.commands), class_="commands", tabindex=0)
    return [*sections, tag("section", tag("h2", "Next commands"), commands, id="commands")]


def _plan_section(facts: ModelFacts) -> Markup:
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


def _pairs(rows: Iterable[tuple[str, str]]) -> Markup:
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in rows))


def _table(head: Iterable[str], rows: Iterable[Iterable[object]], *, numbers: bool = False) -> Markup:
    css_class = "number" if numbers else None
    top = tag("tr", *(tag("th", name, scope="col", class_=css_class) for name in head))
    body = [tag("tr", *(tag("td", cell, class_=css_class) for cell in row)) for row in rows]
    return tag("table", tag("thead", top), tag("tbody", *body), class_="plain")
