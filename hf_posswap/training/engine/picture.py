"""The loss curve of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_posswap.plotting import canvas


def draw_losses(curves: Sequence[tuple[str, list[dict[str, Any]]]], path: Path, *, below: str) -> None:
    """Draw the training loss over the tokens read, one line a phase, and write it to `path` (PNG and SVG).

    Args:
        curves: name and log entries of each phase, in order.
        path: of the picture, a .png.
        below: a line under the title.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: the place cannot be written.

    Example:
        >>> import tempfile
        >>> entries = [{"tokens": 128, "loss": 5.0}, {"tokens": 256, "loss": 4.0}]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draw_losses([("training", entries)], Path(folder) / "loss.png", below="gpt2, rope")
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['loss.png', 'loss.svg']
    """
    picture, (ax,) = canvas.figure(8.0, 4.6)
    canvas.title(ax, "Training loss", below)
    before = 0
    for number, (name, entries) in enumerate(curves):
        points = [(before + entry["tokens"], entry["loss"]) for entry in entries if "loss" in entry]
        if not points:
            continue
        colour = canvas.COLOURS[(2 + number) % len(canvas.COLOURS)]
        ax.plot(*zip(*points, strict=True), color=colour, linewidth=1.6, label=name)
        before = points[-1][0]
    ax.grid(axis="both", color="#e6e6e6", linewidth=0.7)
    ax.set_xlabel("tokens read", fontsize=9)
    ax.set_ylabel("mean loss in nats a token, lower is better", fontsize=9)
    if len(curves) > 1:
        ax.legend(fontsize=9, frameon=False)
    canvas.save(picture, path)
