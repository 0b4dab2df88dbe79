"""A model has one colour and one mark: in the picture, on the page, and in the table."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from hf_posswap.comparison.pictures import draw_pictures
from hf_posswap.comparison.report import render_html
from hf_posswap.comparison.report.looks import model_numbers
from hf_posswap.comparison.tables import markdown
from hf_posswap.inspection.explorer.data import known_choices
from hf_posswap.plotting import canvas
from hf_posswap.plotting.styles import SLIDING, STYLES, scheme_number, sign_of, style_of


@pytest.fixture
def drawn(results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return the figures of the results' pictures."""
    seen: list[Figure] = []
    monkeypatch.setattr(canvas, "save", lambda figure, path: seen.append(figure))
    draw_pictures(results, tmp_path)
    return seen


def test_picture_page_and_table_agree_on_every_model(results: dict[str, Any], drawn: list[Figure]) -> None:
    page = render_html(results)
    colours = dict(re.findall(r"--(c\d): (#[0-9a-f]{6});", page.split("@media")[0]))
    rows = [row for row in markdown(results).splitlines() if row.startswith("| ")][2:]
    for place, number in enumerate((0, 2, 3)):  # no swap, RoPE, ALiBi
        style = style_of(number)
        for figure in drawn[1:3]:  # by length, by position
            lines = [line for line in figure.axes[0].get_lines() if line.get_marker() == style.marker]
            assert [to_hex(line.get_color()) for line in lines] == [style.colour]
        assert colours[f"c{number}"] == style.colour
        legend = page.split('id="perplexity"')[1].split(f'data-model="{number}"')[0].rpartition("<button")[2]
        button = page.split('id="perplexity"')[1].split(f'data-model="{number}">')[1].split("</button>")[0]
        assert legend.startswith(" type=")
        assert f'class="mark c{number}"' in button
        assert f'd="{style.path}"' in button
        assert rows[place].startswith(f"| {style.sign} ")
    needles = drawn[3].axes[: len(results["models"])]
    assert [ax.texts[-1].get_text() for ax in needles] == [style_of(number).sign for number in (0, 2, 3)]
    assert rows[-1].startswith(f"| {sign_of(SLIDING)} base, sliding window |")


def test_a_model_that_a_metric_lacks_moves_no_other_colour(
    results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Figure] = []
    monkeypatch.setattr(canvas, "save", lambda figure, path: seen.append(figure))
    first = next(iter(results["models"].values()))
    for metric in ("ppl_prefix", "nll_pos"):
        del first[metric]
    draw_pictures(results, tmp_path)
    for figure in seen[1:3]:
        markers = {line.get_marker(): to_hex(line.get_color()) for line in figure.axes[0].get_lines()}
        assert STYLES[0].marker not in markers
        assert {style.marker: style.colour for style in STYLES[2:4]}.items() <= markers.items()


def test_the_sliding_window_is_a_dashed_line_without_marks(results: dict[str, Any], drawn: list[Figure]) -> None:
    name = results["sliding"]["name"]
    for figure in drawn[1:3]:
        (line,) = [line for line in figure.axes[0].get_lines() if line.get_label() == name]
        assert line.is_dashed()
        assert line.get_marker() in (None, "None", "")
        assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()][-1] == name
    assert 'class="line ref"' in render_html(results)


def test_a_scheme_has_one_style_in_every_comparison_and_in_the_explorer() -> None:
    def entry(scheme: str | None) -> dict[str, Any]:
        return {"plan": scheme and {"scheme": {"name": scheme}}}

    orders = (["rope", "alibi"], ["alibi", "yarn", "rope"], ["linear", "rope", "alibi", "self_extend"])
    for schemes in orders:
        models = {"base": entry(None), "control": entry(None)} | {name: entry(name) for name in schemes}
        numbers = model_numbers({"models": models})
        assert (numbers["base"], numbers["control"]) == (0, 1)
        assert {name: numbers[name] for name in schemes} == {name: scheme_number(name) for name in schemes}
    for choice in known_choices():
        assert choice.number == scheme_number(choice.name) or scheme_number(choice.name) is None
    assert len({choice.number for choice in known_choices()}) == len(known_choices())
    assert len({*model_numbers({"models": {f"m{n}": entry("rope") for n in range(30)}}).values()}) == 30


def contrast(colour: str, paper: str) -> float:
    """Return the contrast ratio of WCAG 2: https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio."""

    def luminance(text: str) -> float:
        parts = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in to_rgb(text)]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    low, high = sorted((luminance(colour), luminance(paper)))
    return (high + 0.05) / (low + 0.05)


def test_texts_and_lines_have_the_contrast_of_wcag_aa() -> None:
    page = render_colours()
    for text in (canvas.INK, canvas.FAINT, page["light"]["ink"], page["light"]["soft"], page["light"]["alarm"]):
        assert contrast(text, "#ffffff") >= 4.5, text
    for name in ("good", "bad", "open", "soft", "alarm", "ink"):
        assert contrast(page["light"][name], page["light"]["paper"]) >= 4.5, name
        assert contrast(page["dark"][name], page["dark"]["card"]) >= 4.5, name
    for style in STYLES:  # lines and marks: 3 is required of graphics
        assert contrast(style.colour, "#ffffff") >= 3
        assert contrast(style.dark, page["dark"]["card"]) >= 3


def render_colours() -> dict[str, dict[str, str]]:
    """Return the named colours of the page's style sheet, light and dark."""
    light, dark = str(files("hf_posswap.comparison.report").joinpath("page.css").read_text()).split("@media", 2)[:2]
    return {
        kind: dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", text))
        for kind, text in (("light", light), ("dark", dark))
    }


def test_more_models_than_colours_differ_by_their_lines() -> None:
    assert len({style.colour for style in STYLES}) == len({style.marker for style in STYLES}) == len(STYLES)
    assert len({style.sign for style in STYLES}) == len({style.dark for style in STYLES}) == len(STYLES)
    assert style_of(len(STYLES)) == STYLES[0]
