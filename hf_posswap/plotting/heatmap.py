"""The passkey grid: one panel per model, length against depth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_posswap.errors import DataError
from hf_posswap.plotting import canvas
from hf_posswap.plotting.styles import sign_of, style_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage
    from matplotlib.patches import Rectangle

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
    cell_at = {(cell.depth, cell.length): cell for cell in cells}
    shares = [[cell_at[d, n].share if (d, n) in cell_at else math.nan for n in lengths] for d in depths]
    image = ax.imshow(shares, vmin=0.0, vmax=1.0, cmap="Greens", aspect="auto")
    for row, depth in enumerate(depths):
        for column, length in enumerate(lengths):
            cell = cell_at.get((depth, length))
            if cell is None:
                ax.add_patch(_hatched(column, row))
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


def _hatched(column: int, row: int) -> Rectangle:
    from matplotlib.patches import Rectangle

    corner = (column - 0.5, row - 0.5)
    return Rectangle(corner, 1, 1, hatch="///", facecolor="#f4f4f4", edgecolor="#c0c0c0", linewidth=0)
