"""Perplexity, loss and differences from a baseline, one line per model with its interval; and the passkey grid.

The grid has one panel per model, length against depth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.errors import DataError
from hf_posswap.plotting import canvas
from hf_posswap.plotting.styles import sign_of, stroke_of, style_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage


_TALLEST = 40.0
_FARTHEST = 1.0
"""Nats per token: much larger differences are cut off, so that a model that breaks does not flatten the others."""
_STAGGER = 1.035
_LEGEND: dict[str, Any] = {"fontsize": 9, "frameon": False, "loc": "center left", "bbox_to_anchor": (1.01, 0.5)}
_BELOW: dict[str, object] = {"loc": "upper left", "bbox_to_anchor": (0.0, -0.16), "ncols": 2}


@dataclass(frozen=True)
class Point:
    """One measured value with its interval.

    Attributes:
        x: tokens.
        y: the value.
        low: lower end of the interval, or None.
        high: upper end of the interval, or None.
    """

    x: float
    y: float
    low: float | None
    high: float | None

    @property
    def band(self) -> tuple[float, float]:
        """The ends of the interval, or the value itself without an interval."""
        return (self.y if self.low is None else self.low, self.y if self.high is None else self.high)


@dataclass(frozen=True)
class Curve:
    """One model's line.

    Attributes:
        label: for the legend.
        points: sorted by x, at least one.
        ends: why the line ends early, or None; the end is marked.
        reference: whether it is the sliding window: dashed, black, without markers.
        number: the model's number, which selects colour and marker; None: its index among the other curves.
    """

    label: str
    points: tuple[Point, ...]
    ends: str | None = None
    reference: bool = False
    number: int | None = None


def draw_perplexity_by_length(curves: Sequence[Curve], window: int, path: Path, *, below: str) -> None:
    """Draw perplexity over the length read, both on log axes, and write it to `path` (PNG).

    Args:
        curves: x is the length in tokens, y the perplexity.
        window: the original window in tokens, drawn as a dashed line.
        path: the .png file; an .svg is written next to it.
        below: a line under the title that names the data.

    Raises:
        DataError: there are no curves, or one has no points.
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> curve = Curve("rope", (Point(128, 8.0, 7.5, 8.5), Point(256, 7.9, 7.4, 8.4)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draw_perplexity_by_length([curve], 128, Path(folder) / "a.png", below="on 48 documents")
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['a.png', 'a.svg']
    """
    _check(curves)
    picture, (ax,) = canvas.figure(9.0, 5.4)
    canvas.title(ax, "Perplexity by length", below)
    lengths = sorted({int(point.x) for curve in curves for point in curve.points})
    _draw(ax, curves)
    canvas.length_axis(ax, lengths, window)
    values = [value for curve in curves for point in curve.points for value in point.band]
    low, high = min(values), min(max(values), _TALLEST * min(values))
    ax.set_ylim(low * 0.93, high * 1.08)
    canvas.plain_log_y(ax, low * 0.93, high * 1.08)
    ax.set_xlim(lengths[0] / 1.15, lengths[-1] * 1.15)
    canvas.mark_window(ax, window)
    ax.set_xlabel("tokens read of each document (multiples of the original window below)", fontsize=9)
    cut = " (cut off above)" if max(values) > high else ""
    ax.set_ylabel(f"perplexity per token, lower is better{cut}", fontsize=9)
    canvas.save(picture, path)


def draw_difference_by_length(
    curves: Sequence[Curve], window: int, path: Path, *, title: str, baseline: str, below: str
) -> None:
    """Draw the difference of each model from a baseline over the length read, and write it to `path` (PNG).

    The baseline is the line at zero. The right axis has the same differences as changes of perplexity in percent.

    Args:
        curves: x is the length in tokens, y the loss minus that of the baseline, in nats per token.
        window: as in `draw_perplexity_by_length`.
        path: as in `draw_perplexity_by_length`.
        title: the finding.
        baseline: the name of the baseline.
        below: as in `draw_perplexity_by_length`.

    Raises:
        DataError, MissingDependencyError, CheckpointError: as `draw_perplexity_by_length`.
    """
    _check(curves)
    picture, (ax,) = canvas.figure(9.0, 5.0)
    canvas.title(ax, title, below)
    values = [value for curve in curves for point in curve.points for value in point.band]
    nearest = min(max(abs(point.y) for point in curve.points) for curve in curves)
    farthest = max(_FARTHEST, 3 * nearest)
    low, high = max(min([0.0, *values]), -farthest), min(max([0.0, *values]), farthest)
    room = 0.08 * max(high - low, 0.01)
    lengths = sorted({int(point.x) for curve in curves for point in curve.points})
    canvas.length_axis(ax, lengths, window)
    ax.set_xlim(lengths[0] / 1.25, lengths[-1] * 1.4)
    ax.set_ylim(low - room, high + room)
    ax.axhline(0.0, color=canvas.INK, linewidth=1.4, linestyle=(0, (2, 2)), label=baseline, zorder=2)
    _draw_intervals(ax, curves)
    if lengths[0] < window or len(lengths) > 1:
        canvas.mark_window(ax, window, at_bottom=True)
    cut = " (cut off)" if min(values) < low or max(values) > high else ""
    ax.set_xlabel("tokens read of each document (multiples of the original window below)", fontsize=9)
    ax.set_ylabel(f"difference in nats per token; below zero is better{cut}", fontsize=9)
    canvas.percent_axis(ax)
    _legend(ax, [baseline], **_BELOW)
    canvas.save(picture, path)


def _draw_intervals(ax: Axes, curves: Sequence[Curve]) -> None:
    """Draw a line per model with an error bar at each length; models are staggered, so that bars do not overlap."""
    for index, curve in enumerate(curves):
        number = index if curve.number is None else curve.number
        style, line = style_of(number), canvas.DASHES[stroke_of(number)]
        shift = _STAGGER ** (index - (len(curves) - 1) / 2)
        x, y = [shift * point.x for point in curve.points], [point.y for point in curve.points]
        spans = [
            [point.y - point.band[0] for point in curve.points],
            [point.band[1] - point.y for point in curve.points],
        ]
        look: dict[str, Any] = {"color": style.colour, "linestyle": line, "linewidth": 1.8}
        ax.errorbar(
            x,
            y,
            yerr=spans,
            label=f"{curve.label} ({curve.ends})" if curve.ends else curve.label,
            marker=style.marker,
            markersize=6,
            elinewidth=1.4,
            capsize=3.5,
            zorder=3,
            **look,
        )
        if len(x) > 1:
            ax.annotate(
                canvas.percent_text(100 * math.expm1(min(y[-1], _FARTHEST))),
                (x[-1], y[-1]),
                xytext=(8, 0),
                textcoords="offset points",
                fontsize=9,
                fontweight="bold",
                color=canvas.INK,
                va="center",
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1},
                annotation_clip=True,
            )


def draw_loss_by_position(curves: Sequence[Curve], window: int, path: Path, *, below: str) -> None:
    """Draw the mean loss over the position of the token, x on a log axis, and write it to `path` (PNG).

    Args:
        curves: x is the position in tokens, y the loss in nats per token.
        window: as in `draw_perplexity_by_length`.
        path: as in `draw_perplexity_by_length`.
        below: as in `draw_perplexity_by_length`.

    Raises:
        DataError, MissingDependencyError, CheckpointError: as `draw_perplexity_by_length`.
    """
    _check(curves)
    picture, (ax,) = canvas.figure(9.0, 5.4)
    canvas.title(ax, "Loss by position", below)
    _draw(ax, curves)
    farthest = max(point.x for curve in curves for point in curve.points)
    nearest = min(point.x for curve in curves for point in curve.points)
    ticks = [2**k for k in range(0, 40) if nearest / 1.5 <= 2**k <= 1.5 * farthest]
    canvas.length_axis(ax, ticks, window)
    ax.set_xlim(nearest / 1.5, farthest * 1.5)
    canvas.mark_window(ax, window)
    ax.set_xlabel("position of the token in its document (multiples of the original window below)", fontsize=9)
    ax.set_ylabel("mean loss in nats per token, lower is better", fontsize=9)
    canvas.save(picture, path)


def _check(curves: Sequence[Curve]) -> None:
    empty = [curve.label for curve in curves if not curve.points]
    if not curves or empty:
        raise DataError(f"a picture needs curves with points, got {len(curves)} curves, without points: {empty}.")


def _draw(ax: Axes, curves: Sequence[Curve]) -> None:
    for curve in (curve for curve in curves if curve.reference):
        x, y = [p.x for p in curve.points], [p.y for p in curve.points]
        ax.plot(x, y, color=canvas.INK, linewidth=1.4, linestyle=(0, (2, 2)), label=curve.label, zorder=3)
    for index, curve in enumerate(curve for curve in curves if not curve.reference):
        number = index if curve.number is None else curve.number
        style, line = style_of(number), canvas.DASHES[stroke_of(number)]
        x, y = [p.x for p in curve.points], [p.y for p in curve.points]
        label = f"{curve.label} ({curve.ends})" if curve.ends else curve.label
        low, high = [p.band[0] for p in curve.points], [p.band[1] for p in curve.points]
        look: dict[str, Any] = {
            "color": style.colour,
            "marker": style.marker,
            "markersize": 5,
            "linewidth": 1.8,
            "linestyle": line,
        }
        if len(x) > 1:
            ax.fill_between(x, low, high, color=style.colour, alpha=0.10, lw=0)
        else:
            ax.vlines(x, low, high, color=style.colour, linewidth=2, alpha=0.5, zorder=2)
        ax.plot(x, y, label=label, zorder=3, **look)
        if curve.ends:
            ax.plot(x[-1], y[-1], color=style.colour, marker="|", markersize=22, markeredgewidth=2, zorder=4)
    _legend(ax, [curve.label for curve in curves if curve.reference])


def _legend(ax: Axes, references: Sequence[str], **placement: object) -> None:
    """Draw the legend, to the right of the axes by default: the models first, then the references."""
    handles, labels = ax.get_legend_handles_labels()
    models = [number for number, label in enumerate(labels) if label not in references]
    order = [*models, *(number for number in range(len(labels)) if number not in models)]
    legend = ax.legend([handles[n] for n in order], [labels[n] for n in order], **(_LEGEND | placement))
    for text in legend.get_texts():
        text.set_parse_math(False)


_COLUMNS = 3


@dataclass(frozen=True)
class Cell:
    """One cell of a grid.

    Attributes:
        length: tokens of the prompt.
        depth: relative position of the key, 0 to 1.
        share: fraction of keys found, 0 to 1.
        nll: mean loss of the answers' tokens, in nats.
    """

    length: int
    depth: float
    share: float
    nll: float


def draw_passkey(
    grids: Mapping[str, Sequence[Cell]],
    lengths: Sequence[int],
    window: int,
    path: Path,
    *,
    below: str,
    numbers: Mapping[str, int] | None = None,
) -> None:
    """Draw one heatmap per model, coloured by the share of keys found, and write it to `path` (PNG).

    Args:
        grids: the cells by model; lengths that a model could not run have no cells and are hatched.
        lengths: all requested lengths.
        window: the original window, in tokens.
        path: the .png file; an .svg is written next to it.
        below: a line under the title.
        numbers: the models' numbers, which select the marker next to each name; None: their order in `grids`.

    Raises:
        DataError: there is no grid, or all of them are empty.
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: the file cannot be written.
    """
    depths = sorted({cell.depth for cells in grids.values() for cell in cells})
    if not depths:
        raise DataError(f"a passkey picture needs cells, got none for {list(grids)}.")
    columns = min(_COLUMNS, len(grids))
    rows = math.ceil(len(grids) / columns)
    picture, axes = canvas.figure(1.2 + 3.0 * columns, 1.0 + (0.9 + 0.5 * len(depths)) * rows, rows, columns)
    for ax, (name, cells) in zip(axes, grids.items(), strict=False):
        image = _panel(ax, name, cells, lengths, depths, window)
        number = list(grids).index(name) if numbers is None else numbers[name]
        ax.text(0, 1.02, sign_of(number), color=style_of(number).colour, transform=ax.transAxes, fontsize=10)
    for ax in axes[len(grids) :]:
        ax.set_visible(False)
    bar = picture.colorbar(image, ax=axes, shrink=0.8, pad=0.02)
    bar.set_label("share of keys found", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    picture.suptitle(f"Passkey: {below}", fontsize=11, fontweight="bold", color=canvas.INK, x=0.01, ha="left")
    canvas.save(picture, path)


def _panel(
    ax: Axes, name: str, cells: Sequence[Cell], lengths: Sequence[int], depths: Sequence[float], window: int
) -> AxesImage:
    """Draw one model's grid and return its image for the colour bar."""
    from matplotlib.patches import Rectangle

    cell_at = {(cell.depth, cell.length): cell for cell in cells}
    shares = [[cell_at[d, n].share if (d, n) in cell_at else math.nan for n in lengths] for d in depths]
    image = ax.imshow(shares, vmin=0.0, vmax=1.0, cmap="Greens", aspect="auto")
    for row, depth in enumerate(depths):
        for column, length in enumerate(lengths):
            cell = cell_at.get((depth, length))
            if cell is None:
                corner = (column - 0.5, row - 0.5)
                ax.add_patch(
                    Rectangle(corner, 1, 1, hatch="///", facecolor="#f4f4f4", edgecolor="#c0c0c0", linewidth=0)
                )
            else:
                colour = "white" if cell.share > 0.6 else canvas.INK
                text = f"{cell.share:.0%}\n{cell.nll:.1f} nats"
                ax.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
    ax.set_xticks(range(len(lengths)), [canvas.length_label(n, window) for n in lengths], fontsize=8)
    ax.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths], fontsize=8)
    ax.set_ylabel("depth of the key", fontsize=8)
    ax.set_title(f"    {name}", fontsize=10, loc="left", color=canvas.INK)
    ax.set_xticks([i + 0.5 for i in range(len(lengths) - 1)], minor=True)
    ax.set_yticks([i + 0.5 for i in range(len(depths) - 1)], minor=True)
    ax.grid(which="minor", color="white", linewidth=2)
    ax.tick_params(which="minor", length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return image
