"""Shared by all pictures: figures without global state, colours, axes, and atomic saving."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from hf_posswap.errors import MissingDependencyError
from hf_posswap.plotting.styles import STYLES
from hf_posswap.utils.atomic_io import replacing
from hf_posswap.utils.threads import shared

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

INK = "#222222"
FAINT = "#5c666f"
"""For captions: on white its contrast is 5.9, and 4.5 is required by WCAG AA."""
COLOURS = tuple(style.colour for style in STYLES)
_HASH_SALT: Final = "svg.hashsalt"
_SALT = "hf_posswap"  # for reproducible ids in SVG files
DASHES: dict[str, object] = {"solid": "-", "dashed": (0, (4, 2)), "dotted": (0, (1, 1.5)), "dashdot": "-."}
"""The matplotlib line style of each of `hf_posswap.plotting.styles.STROKES`."""
MARKERS = tuple(style.marker for style in STYLES)


def figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Return an empty figure of `width` x `height` inches with a grid of axes, row by row.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "plot") from error
    canvas = Figure(figsize=(width, height), dpi=160, layout="constrained", facecolor="white")
    FigureCanvasAgg(canvas)
    axes = [canvas.add_subplot(rows, columns, 1 + i) for i in range(rows * columns)]
    for ax in axes:
        ax.tick_params(colors=INK, labelsize=9, length=3)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    return canvas, axes


def length_axis(ax: Axes, lengths: list[int], window: int) -> None:
    """Make x a log axis in tokens with a tick at each of `lengths`, labelled as multiples of the window."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [length_label(n, window) for n in lengths])
    ax.minorticks_off()
    ax.grid(axis="both", color="#e6e6e6", linewidth=0.7)
    ax.set_axisbelow(True)


def plain_log_y(ax: Axes, low: float, high: float) -> None:
    """Make y a log axis whose ticks read as plain numbers, about five of them between `low` and `high`."""
    from matplotlib.ticker import MaxNLocator

    ax.set_yscale("log")
    steps = [m * 10.0**e for e in range(-3, 9) for m in (1, 1.5, 2, 3, 4, 5, 6, 7, 8)]
    if high < 3 * low:  # too narrow a range for these steps
        steps = [float(s) for s in MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high)]
    inside = [s for s in steps if low * 0.97 <= s <= high * 1.03]
    while len(inside) > 8:
        inside = inside[::2]
    ax.set_yticks(inside, [f"{s:g}" for s in inside])
    ax.minorticks_off()


def percent_axis(ax: Axes) -> None:
    """Add a right axis with the differences of y, in nats per token, as changes of perplexity in percent."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    def to_percent(nats: ArrayLike) -> np.ndarray:
        return 100 * np.expm1(nats)

    def to_nats(percent: ArrayLike) -> np.ndarray:
        return np.log1p(np.maximum(percent, -99.999) / 100)

    right = ax.secondary_yaxis("right", functions=(to_percent, to_nats))
    right.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: percent_text(value, digits=None)))
    right.tick_params(colors=INK, labelsize=9, length=3)
    right.set_ylabel("change of perplexity", fontsize=9)


def percent_text(value: float, digits: int | None = 1) -> str:
    """Return a change in percent with its sign, written as axes write it.

    Example:
        >>> percent_text(-3.57), percent_text(4.0, digits=None), percent_text(0.0, digits=None)
        ('\N{MINUS SIGN}3.6 %', '+4 %', '0 %')
    """
    number = f"{value:+g}" if digits is None else f"{value:+.{digits}f}"
    return f"{number if value else '0'} %".replace("-", "\N{MINUS SIGN}")


def mark_window(ax: Axes, window: int, *, at_bottom: bool = False) -> None:
    """Draw a line at the end of the original window, with its name at the top or at the bottom, if `ax` reaches it."""
    if not ax.get_xlim()[0] <= window <= ax.get_xlim()[1]:
        return
    ax.axvline(window, color=INK, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
    ax.annotate(
        "original window",
        (window, 0.0 if at_bottom else 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(4, 4 if at_bottom else -4),
        textcoords="offset points",
        fontsize=8,
        color=INK,
        va="bottom" if at_bottom else "top",
        rotation=90,
    )


def title(ax: Axes, text: str, below: str) -> None:
    """Put a bold title and a fainter line under it above the axes, both flush left."""
    ax.set_title(text, loc="left", fontsize=12, fontweight="bold", color=INK, pad=24, parse_math=False)
    ax.annotate(
        below,
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 9),
        textcoords="offset points",
        fontsize=9,
        color=FAINT,
        parse_math=False,
    )


def save(canvas: Figure, path: Path) -> None:
    """Write the picture to `path` as PNG and next to it as SVG, each atomically.

    Dates, versions and random ids are omitted, so that files are reproducible.

    Raises:
        CheckpointError: the file cannot be written.
    """
    with replacing(path) as temporary:
        canvas.savefig(temporary, format="png", metadata={"Software": None})
    with replacing(path.with_suffix(".svg")) as temporary, _salted():
        canvas.savefig(temporary, format="svg", metadata={"Date": None, "Creator": None})


@contextmanager
def _salted() -> Iterator[None]:
    """Let ids in SVG files follow from what is drawn. `rc_context` would reset what other threads set meanwhile."""
    import matplotlib

    settings = matplotlib.rcParams

    def begin() -> Callable[[], None]:
        before, settings[_HASH_SALT] = settings[_HASH_SALT], _SALT
        return partial(settings.__setitem__, _HASH_SALT, before)

    with shared(_HASH_SALT, begin):
        yield


def length_label(tokens: int, window: int) -> str:
    """Return `tokens` as text, with the multiple of the window on a second line if it is a whole number."""
    return f"{tokens}\n{tokens // window}x" if tokens % window == 0 else str(tokens)
