"""Pictures show the numbers they are given: read back from the axes, and from the files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from hf_posswap.errors import CheckpointError, DataError
from hf_posswap.plotting import (
    Cell,
    Curve,
    Point,
    canvas,
    draw_difference_by_length,
    draw_loss_by_position,
    draw_passkey,
    draw_perplexity_by_length,
)

CURVES = [
    Curve("base", (Point(128, 8.0, 7.5, 8.5),), "table ends at 128"),
    Curve("rope", tuple(Point(x, y, y - 0.5, y + 0.5) for x, y in ((128, 8.1), (256, 8.0), (1024, 9.0)))),
]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return the figures that get saved, in order."""
    seen: list[Figure] = []
    save = canvas.save

    def keep(figure: Figure, path: Path) -> None:
        seen.append(figure)
        save(figure, path)

    monkeypatch.setattr(canvas, "save", keep)
    return seen


@pytest.mark.parametrize("draw", [draw_perplexity_by_length, draw_loss_by_position])
def test_a_line_a_model_with_its_points_band_and_end(tmp_path: Path, figures: list[Figure], draw: object) -> None:
    draw(CURVES, 128, tmp_path / "a.png", below="on what")
    ax = figures[0].axes[0]
    lines = {line.get_label(): line for line in ax.get_lines()}
    rope = lines["rope"]
    assert list(zip(*rope.get_data(), strict=True)) == [(128, 8.1), (256, 8.0), (1024, 9.0)]
    assert lines["base (table ends at 128)"].get_color() != rope.get_color()
    assert any(line.get_marker() == "|" and list(line.get_xdata()) == [128] for line in ax.get_lines())
    assert any(set(line.get_xdata()) == {128} and line.is_dashed() for line in ax.get_lines())
    assert ax.get_xscale() == "log"
    bands = [collection.get_paths()[0].get_extents() for collection in ax.collections]
    assert (bands[1].ymin, bands[1].ymax) == pytest.approx((7.5, 9.5))
    assert {"original window", "on what"} <= {text.get_text() for text in ax.texts}


def test_differences_have_a_bar_each_a_zero_line_and_percent_on_the_right(
    tmp_path: Path, figures: list[Figure]
) -> None:
    rows = ((128, -0.012, -0.03, 0.004), (256, -0.024, -0.037, -0.012), (1024, -0.036, -0.045, -0.028))
    curves = [
        Curve("base $a^$", (Point(128, 0.027, 0.008, 0.046),), "ends at 128", number=0),
        Curve("rope", tuple(Point(*row) for row in rows), number=2),
    ]
    said = {"title": "rope reads 8x at 3.5 % lower perplexity", "baseline": "sliding window", "below": "42 documents"}
    draw_difference_by_length(curves, 128, tmp_path / "a.png", **said)
    ax = figures[0].axes[0]
    assert ax.get_title(loc="left") == said["title"]
    line, _, (bars,) = ax.containers[1]
    x, y = line.get_data()
    assert list(y) == [row[1] for row in rows]
    assert list(x) == pytest.approx([row[0] for row in rows], rel=0.02)  # staggered, so that bars do not overlap
    assert [(ends[0][1], ends[1][1]) for ends in bars.get_segments()] == [pytest.approx(row[2:]) for row in rows]
    (zero,) = [one for one in ax.get_lines() if one.get_label() == "sliding window"]
    assert set(zero.get_ydata()) == {0.0}
    assert zero.is_dashed()
    (right,) = ax.child_axes
    low, high = ax.get_ylim()
    right.apply_aspect()
    figures[0].canvas.draw()
    assert right.get_ylim() == pytest.approx((100 * np.expm1(low), 100 * np.expm1(high)))
    assert "0 %" in [label.get_text() for label in right.get_yticklabels()]
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["base $a^$ (ends at 128)", "rope", "sliding window"]


def test_a_model_that_breaks_does_not_flatten_the_differences(tmp_path: Path, figures: list[Figure]) -> None:
    curves = [Curve("near", (Point(256, -0.02, None, None),)), Curve("broken", (Point(256, 9.0, 8.0, 10.0),))]
    draw_difference_by_length(curves, 128, tmp_path / "a.png", title="", baseline="base", below="")
    ax = figures[0].axes[0]
    assert ax.get_ylim()[1] < 1.5
    assert "cut off" in ax.get_ylabel()


def test_a_window_that_the_axis_does_not_reach_is_not_marked(tmp_path: Path, figures: list[Figure]) -> None:
    """Its name lay far outside, and the axes were laid out around it with a warning."""
    for length in (32, 64):
        curve = Curve("a", (Point(length, 8.0, 7.5, 8.5),))
        draw_perplexity_by_length([curve], 64, tmp_path / "a.png", below="")
    marked = ["original window" in [text.get_text() for text in figure.axes[0].texts] for figure in figures]
    assert marked == [False, True]


def test_a_wild_curve_does_not_flatten_the_others(tmp_path: Path, figures: list[Figure]) -> None:
    wild = Curve("wild", (Point(128, 9.0, 8.0, 10.0), Point(256, 1e6, 9e5, 2e6)))
    draw_perplexity_by_length([*CURVES, wild], 128, tmp_path / "a.png", below="")
    ax = figures[0].axes[0]
    assert ax.get_ylim()[1] < 400
    assert "cut off above" in ax.get_ylabel()
    assert 3 <= len(ax.get_yticks()) <= 10


def test_lengths_are_named_by_their_multiple_of_the_window(tmp_path: Path, figures: list[Figure]) -> None:
    draw_perplexity_by_length(CURVES, 128, tmp_path / "a.png", below="")
    labels = [label.get_text() for label in figures[0].axes[0].get_xticklabels()]
    assert labels == ["128\n1x", "256\n2x", "1024\n8x"]
    assert canvas.length_label(100, 128) == "100"


def test_the_grid_shows_shares_and_hatches_what_cannot_run(tmp_path: Path, figures: list[Figure]) -> None:
    grids = {
        "base": [Cell(128, 0.0, 0.25, 1.5), Cell(128, 1.0, 0.75, 0.5)],
        "rope": [Cell(n, d, 0.5, 1.0) for n in (128, 256) for d in (0.0, 1.0)],
    }
    draw_passkey(grids, [128, 256], 128, tmp_path / "a.png", below="found?")
    base, rope = figures[0].axes[:2]
    shown = np.ma.filled(base.images[0].get_array(), np.nan)
    np.testing.assert_array_equal(shown, [[0.25, np.nan], [0.75, np.nan]])
    assert base.images[0].get_clim() == (0.0, 1.0)
    assert len(base.patches) == 2
    assert len(rope.patches) == 0
    assert [text.get_text() for text in base.texts] == ["25%\n1.5 nats", "75%\n0.5 nats", "●"]


def test_files_are_pictures_and_the_same_each_time(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        draw_perplexity_by_length(CURVES, 128, tmp_path / name, below="")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    height, width, _ = imread(tmp_path / "a.png").shape
    assert width > 1000
    assert height > 600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.svg", "b.png", "b.svg"]


def test_the_svg_is_the_picture_by_itself_and_the_same_in_every_process(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from hf_posswap.plotting import Curve, Point, draw_perplexity_by_length
draw_perplexity_by_length([Curve("base", (Point(128, 8.0, 7.5, 8.5),))], 128, Path(sys.argv[1]), below="")
"""
    root = Path(__file__).resolve().parents[2]
    for name, seed in (("a.png", "1"), ("b.png", "2")):
        command = [sys.executable, "-c", code, str(tmp_path / name)]
        environment = os.environ | {"PYTHONHASHSEED": seed, "SOURCE_DATE_EPOCH": seed}
        subprocess.run(command, cwd=root, check=True, env=environment)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    tree = ElementTree.parse(tmp_path / "a.svg")
    width, height = (float(tree.getroot().attrib[side].removesuffix("pt")) for side in ("width", "height"))
    pixels = imread(tmp_path / "a.png").shape
    assert (width / 72 * 160, height / 72 * 160) == pytest.approx((pixels[1], pixels[0]), abs=1)
    text = (tmp_path / "a.svg").read_text()
    assert "dc:date" not in text
    assert not re.search(r'href="(?!#)', text)  # nothing is fetched from elsewhere


def test_nothing_to_draw_and_nowhere_to_write_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="got 0 curves"):
        draw_perplexity_by_length([], 128, tmp_path / "a.png", below="")
    with pytest.raises(DataError, match=r"without points: \['empty'\]"):
        draw_loss_by_position([Curve("empty", ())], 128, tmp_path / "a.png", below="")
    with pytest.raises(DataError, match="got none for"):
        draw_passkey({"base": []}, [128], 128, tmp_path / "a.png", below="")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot write"):
        draw_perplexity_by_length(CURVES, 128, tmp_path / "file" / "a.png", below="")


def test_importing_loads_no_matplotlib_and_its_absence_is_said(tmp_path: Path) -> None:
    code = """
import sys
import hf_posswap.plotting
assert "matplotlib" not in sys.modules
sys.modules["matplotlib.figure"] = sys.modules["matplotlib.backends.backend_agg"] = None  # as if not installed
from hf_posswap.errors import MissingDependencyError
from hf_posswap.plotting.canvas import figure
try:
    figure(1, 1)
except MissingDependencyError as error:
    assert "pip install 'hf-posswap[plot]'" in str(error)
else:
    sys.exit(3)
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
