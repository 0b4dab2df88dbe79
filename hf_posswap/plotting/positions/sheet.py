"""The figure for pictures of mechanisms: light or dark, one page wide, with a grid of panels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.plotting import canvas
from hf_posswap.plotting.styles import Style, stroke_of, style_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

WIDTH = 7.2
"""Inches: the text width of a page; half of it is a column."""
_LIGHT = {"paper": "white", "ink": canvas.INK, "faint": canvas.FAINT, "grid": "#e6e6e6"}
_DARK = {"paper": "#16191d", "ink": "#e9ecef", "faint": "#98a1ab", "grid": "#343a40"}
SIGNED = "RdBu_r"
"""Colour map of signed values. Both maps here are safe for colour-blind readers."""
AMOUNT = "cividis"
_MARKS = 9
"""Number of markers on a line."""
_ROOM = 0.09
"""Inches above and below a panel with its labels: with less, square maps overlap the heading and the caption."""


class Sheet:
    """A figure and its panels.

    Attributes:
        figure: the matplotlib figure.
        panels: its axes, row by row.
        dark: whether it is for a dark page.
    """

    def __init__(self, heading: str, below: str, rows: int, columns: int, *, height: float, dark: bool) -> None:
        self.dark = dark
        self.colours = _DARK if dark else _LIGHT
        figure, self.panels = canvas.figure(WIDTH, 0.75 + height * rows, rows, columns)
        self.figure: Figure = figure
        self.figure.set_facecolor(self.colours["paper"])
        self.figure.get_layout_engine().set(h_pad=_ROOM)  # type: ignore[union-attr, call-arg]
        self.figure.suptitle(
            heading, x=0.01, ha="left", fontsize=12, fontweight="bold", color=self.colours["ink"], wrap=True
        )
        self.figure.supxlabel(below, x=0.01, ha="left", fontsize=8, color=self.colours["faint"], wrap=True)
        for panel in self.panels:
            panel.set_facecolor(self.colours["paper"])
            panel.tick_params(colors=self.colours["ink"], labelsize=8)
            for spine in panel.spines.values():
                spine.set_color(self.colours["faint"])
            for text in (panel.xaxis.label, panel.yaxis.label, panel.title):
                text.set_color(self.colours["ink"])

    def name(self, panel: Axes, text: str) -> None:
        """Put the name of a panel above it, left-aligned."""
        panel.set_title(text, loc="left", fontsize=8, color=self.colours["ink"])

    def axes(self, panel: Axes, x: str, y: str) -> None:
        """Label the axes of a panel."""
        panel.set_xlabel(x, fontsize=8, color=self.colours["ink"])
        panel.set_ylabel(y, fontsize=8, color=self.colours["ink"])

    def ruled(self, panel: Axes) -> None:
        """Draw a grid behind a panel."""
        panel.grid(color=self.colours["grid"], linewidth=0.6)
        panel.set_axisbelow(True)

    def line(self, number: int) -> dict[str, Any]:
        """Return matplotlib's options for the line of the `number`-th scheme, the same in all pictures."""
        style: Style = style_of(number)
        return {
            "color": style.dark if self.dark else style.colour,
            "marker": style.marker,
            "markersize": 4,
            "linewidth": 1.5,
            "linestyle": canvas.DASHES[stroke_of(number)],
        }

    def marked_line(self, number: int, index: int, count: int, points: int) -> dict[str, Any]:
        """Return `line` with staggered markers, so that overlapping lines of `count` schemes stay visible.

        Args:
            number: of the scheme's style.
            index: of the scheme among those of the panel.
            count: number of schemes in the panel.
            points: number of points of the line.
        """
        step = max(count, points // _MARKS)
        return self.line(number) | {"markevery": (step * index // count, step)}

    def length_axis(self, panel: Axes, tokens: int) -> None:
        """Make x a log axis from 1 to `tokens` with plain numbers as tick labels."""
        panel.set_xscale("log", base=2)
        ticks = [4**power for power in range(20) if 4**power <= tokens]
        panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        panel.minorticks_off()

    def legend(self, panel: Axes) -> None:
        """Draw the legend of a panel to its right."""
        panel.legend(
            fontsize=8,
            frameon=False,
            labelcolor=self.colours["ink"],
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
            handlelength=2.8,
        )

    def bar(self, image: ScalarMappable, panels: Axes | Sequence[Axes], text: str) -> None:
        """Draw the colour bar of `image`."""
        bar = self.figure.colorbar(image, ax=panels, shrink=0.9, pad=0.02, aspect=25)
        bar.set_label(text, fontsize=8, color=self.colours["ink"])
        bar.ax.tick_params(labelsize=7, colors=self.colours["ink"])
        bar.outline.set_edgecolor(self.colours["faint"])

    def mark(self, panel: Axes, value: float, text: str, *, vertical: bool) -> None:
        """Draw a labelled line at `value`."""
        draw, anchor = (panel.axvline, (value, 1.0)) if vertical else (panel.axhline, (1.0, value))
        draw(value, color=self.colours["ink"], linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        panel.annotate(
            text,
            anchor,
            xycoords=panel.get_xaxis_transform() if vertical else panel.get_yaxis_transform(),
            xytext=(-3, -4) if vertical else (-3, 3),
            textcoords="offset points",
            fontsize=7,
            color=self.colours["ink"],
            ha="right",
            va="top" if vertical else "bottom",
            rotation=90 if vertical else 0,
            bbox={"facecolor": self.colours["paper"], "edgecolor": "none", "alpha": 0.75, "pad": 1},
        )


@contextmanager
def sheet(
    path: Path, heading: str, below: str, *, rows: int = 1, columns: int = 1, height: float = 3.0, dark: bool = False
) -> Iterator[Sheet]:
    """Yield a sheet to draw on, then write it to `path`, a .png, and an .svg next to it.

    Args:
        path: the .png file.
        heading: the title above the panels.
        below: a caption under the panels that explains how to read them.
        rows: number of rows of panels.
        columns: number of columns of panels.
        height: height of a row, in inches.
        dark: use colours for a dark page.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: the file cannot be written.
    """
    page = Sheet(heading, below, rows, columns, height=height, dark=dark)
    yield page
    canvas.save(page.figure, path)
