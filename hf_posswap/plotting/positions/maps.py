"""Colour maps: tables and their similarities, biases, distances, one token at three positions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hf_posswap.plotting.positions import numbers
from hf_posswap.plotting.positions.lines import ROWS
from hf_posswap.plotting.positions.numbers import Shown
from hf_posswap.plotting.positions.sheet import AMOUNT, SIGNED, sheet

_SIDE = 96
"""Maximum number of positions along a side of a map."""
_HEIGHTS = {1: 3.0, 2: 2.7, 3: 1.95}
"""Height in inches of a row of square maps, by the number of maps in the row."""
_FLOOR = -30.0
PLACES = (0, 50, 99)
"""Positions at which the vector of one token is drawn."""
_DIMENSIONS = 64


def draw_table(subjects: Sequence[Shown], path: Path, *, dark: bool = False) -> list[str]:
    """Draw position tables with one row per position, and return a one-line summary per scheme.

    Args:
        subjects: schemes with a table.
        path: the .png file; an .svg is written next to it.
        dark: use colours for a dark page.
    """
    below = f"The first {ROWS} positions: a row is a position, a column a dimension; red is above 0, blue below."
    below += numbers.before_training(subjects)
    summaries = []
    with sheet(path, "Position tables", below, rows=len(subjects), height=3.0, dark=dark) as page:
        for subject, panel in zip(subjects, page.panels, strict=True):
            rows = numbers.table_rows(subject)
            most = float(rows.abs().max()) or 1.0
            image = panel.imshow(
                rows[:ROWS].numpy(), cmap=SIGNED, vmin=-most, vmax=most, aspect="auto", interpolation="nearest"
            )
            window = subject.geometry.original_length
            if window < min(ROWS, len(rows)):
                panel.axhline(window - 0.5, color="black", linewidth=0.9, linestyle=(0, (4, 3)))
            page.name(panel, f"{subject.name}{' (dashed: the original window ends)' if window < ROWS else ''}")
            page.axes(panel, "dimension", "position")
            page.bar(image, panel, "value")
            summaries.append(
                f"{subject.name}: {rows.shape[0]} positions of {rows.shape[1]} dimensions, up to {most:.3g}"
                + numbers.as_it_begins(subject)
            )
    return summaries


def draw_similarity(subjects: Sequence[Shown], path: Path, *, dark: bool = False) -> list[str]:
    """Draw the cosine of each pair of positions' rows.

    Args:
        subjects: schemes with a table.
        path: the .png file; an .svg is written next to it.
        dark: use colours for a dark page.
    """
    below = "The cosine of the rows of two positions. A cell for several pairs shows the strongest."
    below += numbers.before_training(subjects)
    columns = _columns(len(subjects))
    summaries = []
    with sheet(
        path,
        "Similarity of positions",
        below,
        rows=-(-len(subjects) // columns),
        columns=columns,
        height=_HEIGHTS[columns],
        dark=dark,
    ) as page:
        for subject, panel in zip(subjects, page.panels, strict=False):
            cosines = numbers.similarities(numbers.table_rows(subject))
            cells = numbers.strongest(cosines, _SIDE).numpy()
            ends = (-0.5, len(cosines) - 0.5, len(cosines) - 0.5, -0.5)
            image = panel.imshow(cells, cmap=SIGNED, vmin=-1, vmax=1, extent=ends, interpolation="nearest")
            page.name(panel, subject.name)
            page.axes(panel, "position", "position")
            summaries.append(
                f"{subject.name}: neighbours {cosines.diagonal(1).mean():z.2f}, first and last {cosines[0, -1]:z.2f}"
                + numbers.as_it_begins(subject)
            )
        page.bar(image, page.panels[: len(subjects)], "cosine")
        for panel in page.panels[len(subjects) :]:
            panel.set_visible(False)
    return summaries


def draw_bias(subjects: Sequence[Shown], path: Path, *, dark: bool = False) -> list[str]:
    """Draw the bias matrices of the first, a middle and the last head.

    Args:
        subjects: schemes with a bias.
        path: the .png file; an .svg is written next to it.
        dark: use colours for a dark page.
    """
    below = (
        f"The bias added to the score of query i and key j. From {_FLOOR:.0f} down a key has no weight, and one colour."
        + numbers.before_training(subjects)
    )
    summaries = []
    with sheet(
        path, "Bias by query and key", below, rows=len(subjects), columns=3, height=_HEIGHTS[3], dark=dark
    ) as page:
        for row, subject in enumerate(subjects):
            positions = numbers.places(subject.length, _SIDE)
            biases = numbers.scores(subject, positions, positions, query=torch.zeros(subject.geometry.head_dim))
            heads = [0, len(biases) // 2, len(biases) - 1]
            least, high = (float(fold(biases.nan_to_num(0))) for fold in (torch.min, torch.max))
            low = max(least, _FLOOR) - (least == high)  # a colour scale needs two different ends
            for column, head in enumerate(heads):
                panel = page.panels[3 * row + column]
                image = panel.imshow(
                    biases[head].numpy(),
                    cmap=AMOUNT,
                    vmin=low,
                    vmax=high,
                    extent=_extent(positions),
                    interpolation="nearest",
                )
                page.name(panel, f"{subject.name}: head {head}")
                page.axes(panel, "key j", "query i")
            page.bar(image, page.panels[3 * row : 3 * row + 3], "bias")
            summaries.append(
                f"{subject.name}: from {least:.3g} to {high:.3g} over {len(biases)} heads"
                + numbers.as_it_begins(subject)
            )
    return summaries


def draw_relative(subjects: Sequence[Shown], path: Path, *, dark: bool = False) -> list[str]:
    """Draw the apparent distance of each query-key pair, in tokens of the unswapped model.

    Args:
        subjects: schemes that rotate.
        path: the .png file; an .svg is written next to it.
        dark: use colours for a dark page.
    """
    window = subjects[0].geometry.original_length
    columns = _columns(len(subjects))
    maps = []
    for subject in subjects:
        positions = numbers.places(subject.length, _SIDE)
        maps.append((subject, positions, numbers.apparent_distances(subject, positions, positions)))
    most = max(float(distances.nan_to_num(0).max()) for *_, distances in maps) or 1.0
    below = "Distances according to the slowest rotating pair. " + (
        f"Those beyond {window} (the line) did not occur in training."
        if most > window
        else f"None is beyond the original window of {window}."
    )
    with sheet(
        path,
        "The distances that attention sees",
        below,
        rows=-(-len(maps) // columns),
        columns=columns,
        height=_HEIGHTS[columns],
        dark=dark,
    ) as page:
        for (subject, positions, distances), panel in zip(maps, page.panels, strict=False):
            image = panel.imshow(
                distances.numpy(), cmap=AMOUNT, vmin=0, vmax=most, extent=_extent(positions), interpolation="nearest"
            )
            if float(distances.nan_to_num(0).max()) > window:
                ticks = positions.numpy()
                line = "white" if dark else "black"
                panel.contour(ticks, ticks, distances.numpy(), levels=[window], colors=line, linewidths=0.9)
            page.name(panel, subject.name)
            page.axes(panel, "key j", "query i")
        page.bar(image, page.panels[: len(maps)], "tokens")
        for panel in page.panels[len(maps) :]:
            panel.set_visible(False)
    return [
        f"{subject.name}: the farthest seems {float(distances.nan_to_num(0).max()):.0f} tokens away"
        for subject, _, distances in maps
    ]


def draw_token(subjects: Sequence[Shown], path: Path, *, dark: bool = False) -> list[str]:
    """Draw the effect of position on one token's vector at positions 0, 50 and 99.

    The token is the same for all schemes: independent normal numbers, scaled like the table's rows if there is a table.

    Args:
        subjects: schemes with a table, or schemes that rotate.
        path: the .png file; an .svg is written next to it.
        dark: use colours for a dark page.
    """
    below = f"The first {_DIMENSIONS} dimensions of one token at three positions: a table adds to it, RoPE rotates it."
    below += numbers.before_training(subjects)
    summaries = []
    with sheet(path, "One token at three positions", below, rows=len(subjects), height=1.5, dark=dark) as page:
        for subject, panel in zip(subjects, page.panels, strict=True):
            plain, placed = token_at(subject)
            most = float(placed.abs().max()) or 1.0
            image = panel.imshow(placed[:, :_DIMENSIONS].numpy(), cmap=SIGNED, vmin=-most, vmax=most, aspect="auto")
            panel.set_yticks(range(len(PLACES)), [str(position) for position in PLACES])
            page.name(panel, f"{subject.name}: {'added' if subject.table is not None else 'rotated'}")
            page.axes(panel, "dimension", "position")
            page.bar(image, panel, "")
            cosines = torch.nn.functional.cosine_similarity(placed, plain[None], dim=-1)
            cosines_text = ", ".join(
                f"{value:z.2f} at {position}" for value, position in zip(cosines, PLACES, strict=True)
            )
            summaries.append(
                f"{subject.name}: cosine with the token itself {cosines_text}{numbers.as_it_begins(subject)}"
            )
    return summaries


def token_at(subject: Shown) -> tuple[Tensor, Tensor]:
    """Return one token's vector, [E] or [D], and its value at each of `PLACES`, [3, E] or [3, D]."""
    source = torch.Generator().manual_seed(1)  # not the seed of the random table rows
    if subject.table is not None:
        rows = numbers.table_rows(subject, max(PLACES[-1] + 1, subject.length))
        token = torch.randn(rows.shape[1], generator=source) * rows.square().mean().sqrt()
        return token, token + rows[list(PLACES)]
    token = torch.randn(subject.geometry.head_dim, generator=source)
    return token, numbers.turned(subject, token, torch.tensor(PLACES))


def _extent(at: Tensor) -> tuple[float, float, float, float]:
    last = float(at[-1])
    return -0.5, last + 0.5, last + 0.5, -0.5


def _columns(maps: int) -> int:
    """Return the number of maps in a row: at most three, and two for four maps."""
    return 2 if maps == 4 else min(3, maps)
