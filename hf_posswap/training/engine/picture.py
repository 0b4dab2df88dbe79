"""Plots the loss curve of a run: every measurement, the running mean, and held-out losses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_posswap.plotting import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SMOOTHED = 30  # fewer points are not smoothed
_PARTS = 15  # the running mean covers one of this many parts of a curve
_FIRST_COLOUR = 2  # blue: grey and black are for unswapped models


def draw_losses(
    curves: Sequence[tuple[str, list[dict[str, Any]]]],
    path: Path,
    *,
    below: str,
    unit: str = "nats a token",
) -> None:
    """Plot the training loss over the tokens read, a line per phase, and write it to `path` (PNG and SVG).

    Held-out losses in the log are plotted as dots, a colour per length.

    Args:
        curves: name and log entries of each phase, in order.
        path: of the picture, a .png.
        below: a line under the title.
        unit: of the loss.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> entries = [{"step": 1, "tokens": 128, "loss": 5.0}, {"step": 2, "tokens": 256, "loss": 4.0}]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draw_losses([("training", entries)], Path(folder) / "loss.png", below="gpt2, rope")
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['loss.png', 'loss.svg']
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    picture, (ax,) = canvas.figure(8.0, 4.6)
    canvas.title(ax, "Training loss", below)
    measured = _draw_phases(ax, curves)
    if measured:
        _draw_held_out(ax, measured, colour=_FIRST_COLOUR + len(curves))
    ax.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.xaxis.set_major_locator(MaxNLocator(7))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: count(tokens)))
    ax.margins(x=0.02)
    ax.set_xlabel("tokens read", fontsize=9, color=canvas.INK)
    ax.set_ylabel(f"{unit}, lower is better", fontsize=9, color=canvas.INK)
    if len(curves) > 1 or measured:
        ax.legend(fontsize=9, frameon=False, labelcolor=canvas.INK)
    canvas.save(picture, path)


def _draw_phases(ax: Axes, curves: Sequence[tuple[str, list[dict[str, Any]]]]) -> dict[str, list[tuple[float, float]]]:
    """Plot the phases one after another, and return tokens and loss of held-out measurements by length."""
    offset, measured = 0.0, dict[str, list[tuple[float, float]]]()
    for number, (name, entries) in enumerate(curves):
        steps = [entry for entry in entries if "loss" in entry]
        if not steps:
            continue
        tokens = np.array([offset + entry["tokens"] for entry in steps])
        _draw_curve(ax, tokens, np.array([entry["loss"] for entry in steps]), name, _FIRST_COLOUR + number)
        tokens_per_step = steps[-1]["tokens"] / steps[-1]["step"]
        for entry in (entry for entry in entries if "nll" in entry):
            for length, nll in entry["nll"].items():
                measured.setdefault(length, []).append((offset + entry["step"] * tokens_per_step, nll))
        if number:
            ax.axvline(offset, color=canvas.FAINT, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        offset = float(tokens[-1])
    return measured


def _draw_curve(ax: Axes, tokens: np.ndarray, losses: np.ndarray, name: str, colour: int) -> None:
    smooth, mean = len(losses) >= _SMOOTHED, running_mean(losses, len(losses) // _PARTS)
    style: dict[str, Any] = {"color": _colour(colour), "solid_capstyle": "round"}
    if smooth:
        ax.plot(tokens, losses, linewidth=0.8, alpha=0.3, **style)
    marker = "" if smooth else "o"
    ax.plot(tokens, mean if smooth else losses, marker=marker, markersize=3.5, linewidth=2.0, label=name, **style)


def _draw_held_out(ax: Axes, measured: dict[str, list[tuple[float, float]]], colour: int) -> None:
    for number, (length, points) in enumerate(measured.items()):
        marker = canvas.MARKERS[number % len(canvas.MARKERS)]
        label = f"held out, {int(length):,} tokens"
        style = {"color": _colour(colour + number), "marker": marker, "markersize": 5, "linewidth": 1.0}
        ax.plot(*zip(*points, strict=True), label=label, zorder=3, **style)  # type: ignore[arg-type]


def _colour(number: int) -> str:
    return canvas.COLOURS[number % len(canvas.COLOURS)]


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of the last `window` values at each index, [N]; of fewer at the beginning.

    Example:
        >>> running_mean(np.array([4.0, 2.0, 2.0, 8.0]), 2)
        array([4., 3., 2., 5.])
    """
    sums = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - max(1, window))
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


def count(number: float) -> str:
    """Return a number of tokens with a unit prefix.

    Example:
        >>> [count(n) for n in (0, 512, 1500, 250000, 1.5e6, 2e9)]
        ['0', '512', '1.5 k', '250 k', '1.5 M', '2 G']
    """
    for size, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= size:
            return f"{number / size:.4g}{name}"
    return f"{number:.4g}"
