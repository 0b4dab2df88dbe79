"""Pictures with colours: tables and their likenesses, biases, distances, one token at three places."""

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
"""Positions along a side of a map: more are not seen."""
_HEIGHTS = {1: 3.0, 2: 2.7, 3: 1.95}
"""Of a row of square maps, in inches, by how many stand beside each other."""
_FLOOR = -30.0
PLACES = (0, 50, 99)
"""Of the one token whose vector is drawn."""
_DIMENSIONS = 64


def draw_table(subjects: Sequence[Shown], path: Path, *, dark: bool = False) -> list[str]:
    """Draw position tables, a row a position, and return what is to be seen, a line a scheme.

    Args:
        subjects: with a table.
        path: of the picture, a .png; an .svg is drawn beside it.
        dark: for a dark page.
    """
    below = f"The first {ROWS} positions: a row is a position, a column a dimension; red is above 0, blue below."
    below += numbers.before_training(subjects)
    said = []
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
            said.append(
                f"{subject.name}: {rows.shape[0]} positions of {rows.shape[1]} dimensions, up to {most:.3g}"
                + numbers.as_it_begins(subject)
            )
    return said


def draw_similarity(subjects: Sequence[Shown], path: Path, *, dark: bool = False) -> list[str]:
    """Draw the cosine of each position's row with each other's.

    Args:
        subjects: with a table.
        path: of the picture, a .png; an .svg is drawn beside it.
        dark: for a dark page.
    """
    below = "The cosine of the rows of two positions. A cell that holds several pairs shows the strongest."
    below += numbers.before_training(subjects)
    columns = _columns(len(subjects))
    said = []
    with sheet(
        path,
        "Likeness of positions",
        below,
        rows=-(-len(subjects) // columns),
        columns=columns,
        height=_HEIGHTS[columns],
        dark=dark,
    ) as page:
        for subject, panel in zip(subjects, page.panels, strict=False):
            made = numbers.similarities(numbers.table_rows(subject))
            cells = numbers.strongest(made, _SIDE).numpy()
            ends = (-0.5, len(made) - 0.5, len(made) - 0.5, -0.5)
            image = panel.imshow(cells, cmap=SIGNED, vmin=-1, vmax=1, extent=ends, interpolation="nearest")
            page.name(panel, subject.name)
            page.axes(panel, "position", "position")
            said.append(
                f"{subject.name}: neighbours {made.diagonal(1).mean():z.2f}, first and last {made[0, -1]:z.2f}"
                + numbers.as_it_begins(subject)
            )
        page.bar(image, page.panels[: len(subjects)], "cosine")
        _hide(page.panels[len(subjects) :])
    return said


def draw_bias(subjects: Sequence[Shown], path: Path, *, dark: bool = False) -> list[str]:
    """Draw the bias matrices of the first, a middle and the last head.

    Args:
        subjects: with a bias.
        path: of the picture, a .png; an .svg is drawn beside it.
        dark: for a dark page.
    """
    below = (
        f"What is added to the score of query i and key j; from {_FLOOR:.0f} down a key has no weight, and one colour."
        + numbers.before_training(subjects)
    )
    said = []
    with sheet(
        path, "Bias by query and key", below, rows=len(subjects), columns=3, height=_HEIGHTS[3], dark=dark
    ) as page:
        for row, subject in enumerate(subjects):
            at = _places(subject.length)
            made = numbers.scores(subject, at, at, query=torch.zeros(subject.geometry.head_dim))
            heads = _three(len(made))
            least, high = (float(fold(made.nan_to_num(0))) for fold in (torch.min, torch.max))
            low = max(least, _FLOOR) - (least == high)  # colours need two ends
            for column, head in enumerate(heads):
                panel = page.panels[3 * row + column]
                image = panel.imshow(
                    made[head].numpy(), cmap=AMOUNT, vmin=low, vmax=high, extent=_extent(at), interpolation="nearest"
                )
                page.name(panel, f"{subject.name}: head {head}")
                page.axes(panel, "key j", "query i")
            page.bar(image, page.panels[3 * row : 3 * row + 3], "bias")
            said.append(
                f"{subject.name}: from {least:.3g} to {high:.3g} over {len(made)} heads{numbers.as_it_begins(subject)}"
            )
    return said


def draw_relative(subjects: Sequence[Shown], path: Path, *, dark: bool = False) -> list[str]:
    """Draw the distance that each pair of query and key seems to have, in tokens of the unswapped model.

    Args:
        subjects: that rotate.
        path: of the picture, a .png; an .svg is drawn beside it.
        dark: for a dark page.
    """
    window = subjects[0].geometry.original_length
    columns = _columns(len(subjects))
    found = []
    for subject in subjects:
        at = _places(subject.length)
        found.append((subject, at, numbers.apparent_distances(subject, at, at)))
    most = max(float(made.nan_to_num(0).max()) for *_, made in found) or 1.0
    below = "Distances as the slowest pair that turns tells them. " + (
        f"Beyond {window} (the line) the model met none."
        if most > window
        else f"None is beyond the original window of {window}."
    )
    with sheet(
        path,
        "The distances that attention sees",
        below,
        rows=-(-len(found) // columns),
        columns=columns,
        height=_HEIGHTS[columns],
        dark=dark,
    ) as page:
        for (subject, at, made), panel in zip(found, page.panels, strict=False):
            image = panel.imshow(
                made.numpy(), cmap=AMOUNT, vmin=0, vmax=most, extent=_extent(at), interpolation="nearest"
            )
            if float(made.nan_to_num(0).max()) > window:
                places = at.numpy()
                line = "white" if dark else "black"
                panel.contour(places, places, made.numpy(), levels=[window], colors=line, linewidths=0.9)
            page.name(panel, subject.name)
            page.axes(panel, "key j", "query i")
        page.bar(image, page.panels[: len(found)], "tokens")
        _hide(page.panels[len(found) :])
    return [
        f"{one.name}: the farthest seems {float(made.nan_to_num(0).max()):.0f} tokens away" for one, _, made in found
    ]


def draw_token(subjects: Sequence[Shown], path: Path, *, dark: bool = False) -> list[str]:
    """Draw what position does to one token's vector at places 0, 50 and 99: added by a table, turned by a rotation.

    The token is the same in all: independent normal numbers, of the size of the table's rows where one is added.

    Args:
        subjects: with a table, or that rotate.
        path: of the picture, a .png; an .svg is drawn beside it.
        dark: for a dark page.
    """
    below = f"The first {_DIMENSIONS} dimensions of one token at three places; a table adds to it, a rotation turns it."
    below += numbers.before_training(subjects)
    said = []
    with sheet(path, "One token at three places", below, rows=len(subjects), height=1.5, dark=dark) as page:
        for subject, panel in zip(subjects, page.panels, strict=True):
            plain, placed = token_at(subject)
            most = float(placed.abs().max()) or 1.0
            image = panel.imshow(placed[:, :_DIMENSIONS].numpy(), cmap=SIGNED, vmin=-most, vmax=most, aspect="auto")
            panel.set_yticks(range(len(PLACES)), [str(place) for place in PLACES])
            page.name(panel, f"{subject.name}: {'added' if subject.table is not None else 'turned'}")
            page.axes(panel, "dimension", "place")
            page.bar(image, panel, "")
            cosines = torch.nn.functional.cosine_similarity(placed, plain[None], dim=-1)
            told = ", ".join(f"{value:z.2f} at {place}" for value, place in zip(cosines, PLACES, strict=True))
            said.append(f"{subject.name}: cosine with the token itself {told}{numbers.as_it_begins(subject)}")
    return said


def token_at(subject: Shown) -> tuple[Tensor, Tensor]:
    """Return one token's vector, [E] or [D], and what it is at each of `PLACES`, [3, E] or [3, D]."""
    source = torch.Generator().manual_seed(1)  # another than the random rows that stand for a model's table
    if subject.table is not None:
        rows = numbers.table_rows(subject, max(PLACES[-1] + 1, subject.length))
        token = torch.randn(rows.shape[1], generator=source) * rows.square().mean().sqrt()
        return token, token + rows[list(PLACES)]
    token = torch.randn(subject.geometry.head_dim, generator=source)
    return token, numbers.turned(subject, token, torch.tensor(PLACES))


def _places(length: int) -> Tensor:
    return torch.linspace(0, length - 1, min(_SIDE, length)).round().long().unique()


def _extent(at: Tensor) -> tuple[float, float, float, float]:
    last = float(at[-1])
    return -0.5, last + 0.5, last + 0.5, -0.5


def _columns(maps: int) -> int:
    """Return how many maps stand beside each other: three at most, four in a square."""
    return 2 if maps == 4 else min(3, maps)


def _three(heads: int) -> list[int]:
    return [0, heads // 2, heads - 1]


def _hide(panels: Sequence[object]) -> None:
    for panel in panels:
        panel.set_visible(False)  # type: ignore[attr-defined]
