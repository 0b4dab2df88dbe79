"""The whole page: one HTML file that needs no network, whose pictures the browser draws."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from hf_posswap.explorer.about import about_model
from hf_posswap.explorer.beginnings import beginnings
from hf_posswap.explorer.choices import (
    CHOICES,
    GROUPS,
    SLIDERS,
    Choice,
    first_schemes,
    first_settings,
    limits,
    styles,
)
from hf_posswap.explorer.model import ModelFacts
from hf_posswap.report.document import document
from hf_posswap.report.looks import look, mark
from hf_posswap.report.markup import Markup, json_script, tag
from hf_posswap.utils.atomic_io import write_text

PAGE = "positions.html"
"""The name of the page where none is given."""
SCRIPTS = (
    "numbers", "rotary", "piecewise", "bias", "table", "data", "colours", "elements", "lines", "maps", "pictures",
    "controls",
)  # fmt: skip
"""The modules of the script, each after those that it needs."""
_PICTURES = (
    (
        "wavelengths",
        "Tokens in which a rotary pair completes a turn",
        "A pair that completes no turn within the original window has met only a part of the circle in training: "
        "beyond the window it comes to angles that it never met. Scaled RoPE differs in what it does with these pairs.",
    ),
    (
        "scores",
        "Attention score by distance",
        "What a query gives to a key like itself, by how far back the key lies: what positions alone do.",
    ),
    (
        "relative",
        "The distances that attention sees",
        "Each pair of query and key, by the distance that it seems to have in tokens of the unswapped model. Left of "
        "the dashed line and below it are pairs farther apart than the original window.",
    ),
    (
        "bias",
        "Bias by query and key",
        "What is added to the score, in the first, a middle and the last head; from -30 down a key has no weight, and "
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
        "The sinusoidal table",
        "A row a position, a column a dimension: red is above 0, blue below. Its width is that of all heads together.",
    ),
    (
        "similarity",
        "Likeness of positions in a table",
        "The cosine of two rows by their distance. A tiled table tells positions a window apart from each other by "
        "nothing, a stretched one neighbours by little; sinusoids grow apart slowly.",
    ),
)


def write_page(path: Path, facts: ModelFacts | None = None) -> None:
    """Write the page to `path`, whole or not at all.

    Args:
        path: of the .html file.
        facts: of the model that the page is about; None: of schemes alone.

    Raises:
        CheckpointError: the file cannot be written.
    """
    write_text(path, render_page(facts))


def render_page(facts: ModelFacts | None = None) -> str:
    """Return the page: styles, scripts and data inside, nothing loaded from elsewhere.

    Args:
        facts: as in `write_page`.

    Example:
        >>> render_page().startswith("<!doctype html>")
        True
    """
    title = "Position schemes" if facts is None else f"Positions of {facts.name}"
    lead = (
        "Choose schemes and move the sliders: every picture is drawn anew from the schemes' own formulas. The address "
        "keeps what you choose."
    )
    about = [] if facts is None else about_model(facts)
    return document(
        title,
        tag("header", tag("h1", title), tag("p", lead, class_="lead")),
        tag("main", *about, _controls(facts), *(_picture(*one) for one in _PICTURES)),
        json_script(_settings(facts), "settings"),
        tag("script", Markup("\n".join(_asset(f"js/{name}.js") for name in SCRIPTS))),
        style=_asset("page.css"),
    )


def _settings(facts: ModelFacts | None) -> dict[str, object]:
    """Return what the script begins with."""
    geometry = None if facts is None else facts.explanation.report.geometry
    first = first_settings(geometry, None if facts is None else facts.length)
    chosen = first_schemes(geometry, None if facts is None else facts.scheme)
    ends = limits(first)
    return {
        "styles": styles(),
        "start": {"settings": first, "schemes": chosen},
        "limits": ends,
        "beginnings": beginnings(int(ends["heads"][1])),
    }


def _controls(facts: ModelFacts | None) -> Markup:
    groups = [
        tag(
            "fieldset",
            tag("legend", f"Schemes that {group}" if group != GROUPS[-1] else "Others"),
            tag("div", *(_chip(choice) for choice in CHOICES if choice.group == group), class_="chips"),
        )
        for group in GROUPS
    ]
    sliders = [
        tag(
            "div",
            tag("label", slider.words, for_=f"number-{slider.name}"),
            _void("input", type="range", id=f"slide-{slider.name}", min=0, max=1000, step=1, aria_label=slider.words),
            _void("input", type="number", id=f"number-{slider.name}", step="any", inputmode="decimal"),
            class_="slider",
        )
        for slider in SLIDERS
    ]
    heading = "What to draw" if facts is None else "What to draw, in the shape of the model"
    foot = tag("div", tag("button", "Start again", type="button", id="reset"), tag("p", id="state"), class_="foot")
    return tag(
        "section",
        tag("h2", heading),
        tag("div", *groups, id="schemes"),
        tag("div", *sliders, class_="sliders"),
        foot,
        tag("ul", class_="said", id="words"),
        tag("div", id="refused", aria_live="polite"),
        id="choose",
    )


def _chip(choice: Choice) -> Markup:
    number = CHOICES.index(choice)
    box = _void("input", type="checkbox", value=choice.name)
    return tag("label", box, mark(number), choice.name, title=choice.summary, class_=look(number))


def _void(name: str, **attributes: object) -> Markup:
    """Return an element that has no end."""
    return Markup(str(tag(name, **attributes)).removesuffix(f"</{name}>"))


def _picture(name: str, heading: str, words: str) -> Markup:
    place = tag("div", class_="place", id=f"place-{name}")
    said = tag("ul", class_="said")
    return tag("section", tag("h2", heading), tag("p", words, class_="note"), place, said, id=name)


def _asset(name: str) -> Markup:
    return Markup(files("hf_posswap.explorer").joinpath(name).read_text(encoding="utf-8"))
