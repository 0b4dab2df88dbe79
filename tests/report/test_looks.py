"""A model has one colour and one mark: in the picture, on the page, and in the table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from hf_posswap.comparison.pictures import draw_pictures
from hf_posswap.comparison.tables import markdown
from hf_posswap.plotting import canvas
from hf_posswap.plotting.styles import SLIDING, STYLES, sign_of, style_of
from hf_posswap.report import render_html


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
    for number in range(len(results["models"])):
        style = style_of(number)
        for figure in drawn[:2]:  # by length, by position
            lines = [line for line in figure.axes[0].get_lines() if line.get_marker() == style.marker]
            assert [to_hex(line.get_color()) for line in lines] == [style.colour]
        assert colours[f"c{number}"] == style.colour
        legend = page.split('id="perplexity"')[1].split(f'data-model="{number}"')[0].rpartition("<button")[2]
        button = page.split('id="perplexity"')[1].split(f'data-model="{number}">')[1].split("</button>")[0]
        assert legend.startswith(" type=")
        assert f'class="mark c{number}"' in button
        assert f'd="{style.path}"' in button
        assert rows[number].startswith(f"| {style.sign} ")
    needles = drawn[2].axes[: len(results["models"])]
    assert [ax.texts[-1].get_text() for ax in needles] == [style.sign for style in STYLES[:3]]
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
    for figure in seen[:2]:
        markers = {line.get_marker(): to_hex(line.get_color()) for line in figure.axes[0].get_lines()}
        assert STYLES[0].marker not in markers
        assert {style.marker: style.colour for style in STYLES[1:3]}.items() <= markers.items()


def test_the_sliding_window_is_a_dashed_line_without_marks(results: dict[str, Any], drawn: list[Figure]) -> None:
    name = results["sliding"]["name"]
    for figure in drawn[:2]:
        (line,) = [line for line in figure.axes[0].get_lines() if line.get_label() == name]
        assert line.is_dashed()
        assert line.get_marker() in (None, "None", "")
        assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()][-1] == name
    assert 'class="line ref"' in render_html(results)


def test_more_models_than_colours_differ_by_their_lines() -> None:
    assert len({style.colour for style in STYLES}) == len({style.marker for style in STYLES}) == len(STYLES)
    assert len({style.sign for style in STYLES}) == len({style.dark for style in STYLES}) == len(STYLES)
    assert style_of(len(STYLES)) == STYLES[0]
