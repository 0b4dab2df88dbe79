"""Line plots: wavelengths, scores by distance, waves of a table, similarity by distance, rotating pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from hf_posswap.plotting.positions import numbers
from hf_posswap.plotting.positions.numbers import Shown
from hf_posswap.plotting.positions.sheet import sheet
from hf_posswap.plotting.styles import distinct_numbers, scheme_number

_POINTS = 200
_BELOW = 1.5
"""The lowest score drawn, in units of a token's score with itself: lower ones have no weight in the softmax."""
_TURNS = 24
"""Number of positions at which a rotating pair is drawn."""
_CIRCLE = torch.linspace(0, 2 * math.pi, 100)
ROWS = 128
"""Number of table positions drawn: more would hide the fast waves."""


def draw_wavelengths(subjects: Sequence[Shown], path: Path, *, dark: bool = False) -> list[str]:
    """Draw the tokens in which each rotary pair completes a turn, and return a one-line summary per scheme.

    A pair that does not complete a turn within the original window has seen only a part of the circle in training, and
    reaches unseen angles beyond the window. Variants of scaled RoPE treat these pairs differently.

    Args:
        subjects: schemes that rotate.
        path: the .png file; an .svg is written next to it.
        dark: use colours for a dark page.
    """
    first = subjects[0]
    window, target = first.geometry.original_length, first.length
    below = f"Pairs above {window} never completed a turn in training; {target} is the length after the swap."
    with sheet(path, "Tokens in which a rotary pair completes a turn", below, height=3.6, dark=dark) as page:
        panel = page.panels[0]
        page.ruled(panel)
        for index, (number, subject) in enumerate(zip(_style_numbers(subjects), subjects, strict=True)):
            lengths = numbers.wavelengths(subject)
            shown = lengths.masked_fill(lengths.isinf(), torch.nan)
            look = page.marked_line(number, index, len(subjects), len(lengths))
            panel.plot(range(len(lengths)), shown.numpy(), label=subject.name, **look)
        panel.set_yscale("log", base=10)
        page.mark(panel, window, f"original window, {window}", vertical=False)
        if target != window:
            page.mark(panel, target, f"target, {target}", vertical=False)
        page.axes(panel, "pair, from the fastest to the slowest", "tokens per turn")
        page.legend(panel)
    summaries = []
    for subject in subjects:
        lengths = numbers.wavelengths(subject)
        never, still = (int((lengths > tokens).sum()) for tokens in (window, target))
        summaries.append(
            f"{subject.name}: {never} of {len(lengths)} pairs complete no turn within {window} tokens, {still} none "
            f"within {target}"
        )
    return summaries


def draw_scores(subjects: Sequence[Shown], path: Path, *, dark: bool = False) -> list[str]:
    """Draw the score of a query with an identical key by their distance, as the mean and range over heads.

    Args:
        subjects: schemes that act inside attention, or have no positions at all.
        path: the .png file; an .svg is written next to it.
        dark: use colours for a dark page.
    """
    first = subjects[0]
    window, target = first.geometry.original_length, first.length
    # whole distances, log-spaced, and the last one of the window and of the target
    spread = numbers.spread_distances(target, _POINTS)
    distances = torch.cat((spread, torch.tensor([window - 1, target - 1]))).unique()
    x = (distances + 1).numpy()
    below = "The last query and the key d tokens before it, both of ones; lines are means of heads, bands all heads."
    below += numbers.before_training(subjects)
    all_scores = [numbers.scores_by_distance(subject, distances) for subject in subjects]
    with sheet(path, "Attention score by distance", below, height=3.6, dark=dark) as page:
        panel = page.panels[0]
        page.ruled(panel)
        drawn = zip(_style_numbers(subjects), subjects, all_scores, strict=True)
        for index, (number, subject, head_scores) in enumerate(drawn):
            look = page.marked_line(number, index, len(subjects), len(x))
            panel.plot(x, head_scores.mean(0).numpy(), label=subject.name, **look)
            low, high = head_scores.amin(0).numpy(), head_scores.amax(0).numpy()
            if (low < high).any():
                panel.fill_between(x, low, high, color=look["color"], alpha=0.12, linewidth=0)
        lowest = max(
            min(float(head_scores.min()) for head_scores in all_scores), -_BELOW * first.geometry.head_dim**0.5
        )
        highest = max(float(head_scores.max()) for head_scores in all_scores)
        room = 0.05 * (highest - lowest) or 1.0
        panel.set_ylim(lowest - room, highest + room)
        page.length_axis(panel, target)
        page.mark(panel, window, "original window", vertical=True)
        page.axes(panel, "distance d + 1, tokens", "score (before the softmax)")
        page.legend(panel)
    at = [int((distances == distance).nonzero()) for distance in (0, window - 1, target - 1)]
    return [
        f"{subject.name}: "
        + ", ".join(f"{head_scores.mean(0)[index]:z.2f} at {int(distances[index])}" for index in at)
        + numbers.as_it_begins(subject)
        for subject, head_scores in zip(subjects, all_scores, strict=True)
    ]


def draw_waves(subjects: Sequence[Shown], path: Path, *, dark: bool = False) -> list[str]:
    """Draw single dimensions of position tables along the positions.

    Args:
        subjects: schemes with a table.
        path: the .png file; an .svg is written next to it.
        dark: use colours for a dark page.
    """
    below = f"Each line is one dimension of the rows, at the first {ROWS} positions.{numbers.before_training(subjects)}"
    summaries = []
    with sheet(path, "Dimensions of a position table", below, rows=len(subjects), height=2.2, dark=dark) as page:
        for subject, panel in zip(subjects, page.panels, strict=True):
            rows = numbers.table_rows(subject)
            width = rows.shape[1]
            chosen = sorted({0, width // 8, width // 4, width // 2})
            page.ruled(panel)
            for number, dimension in enumerate(chosen):
                look = page.line(number + 2) | {"marker": None, "linewidth": 1.0}
                panel.plot(rows[:ROWS, dimension].numpy(), label=f"dimension {dimension}", **look)
            page.name(panel, subject.name)
            page.axes(panel, "position", "value")
            page.legend(panel)
            summaries.append(
                f"{subject.name}: {len(rows)} rows of {width}, root mean square {rows.square().mean().sqrt():.3g}"
                + numbers.as_it_begins(subject)
            )
    return summaries


def draw_similarity_by_distance(subjects: Sequence[Shown], path: Path, *, dark: bool = False) -> list[str]:
    """Draw the mean cosine of two rows of a table by the distance of their positions.

    Args:
        subjects: schemes with a table.
        path: the .png file; an .svg is written next to it.
        dark: use colours for a dark page.
    """
    below = f"Mean cosine of all pairs of rows that are d positions apart.{numbers.before_training(subjects)}"
    summaries = []
    with sheet(path, "Similarity of positions by distance", below, height=3.2, dark=dark) as page:
        panel = page.panels[0]
        page.ruled(panel)
        for index, (number, subject) in enumerate(zip(_style_numbers(subjects), subjects, strict=True)):
            cosines = numbers.similarity_by_distance(numbers.table_rows(subject))
            look = page.marked_line(number, index, len(subjects), len(cosines))
            panel.plot(cosines.numpy(), label=subject.name, **look)
            middle = len(cosines) // 2
            summaries.append(
                f"{subject.name}: {cosines[1]:z.2f} one apart, {cosines[middle]:z.2f} {middle} apart"
                + numbers.as_it_begins(subject)
            )
        page.mark(panel, subjects[0].geometry.original_length, "original window", vertical=True)
        page.axes(panel, "distance d, tokens", "cosine")
        page.legend(panel)
    return summaries


def _style_numbers(subjects: Sequence[Shown]) -> list[int]:
    """Return the number of each scheme's style, as in all other pictures."""
    return distinct_numbers([scheme_number(subject.scheme.name) for subject in subjects])


def draw_turning(subjects: Sequence[Shown], path: Path, *, dark: bool = False) -> list[str]:
    """Draw one query's fastest, middle and slowest pair in the plane, position by position.

    Args:
        subjects: schemes that rotate.
        path: the .png file; an .svg is written next to it.
        dark: use colours for a dark page.
    """
    window = subjects[0].geometry.original_length
    step = max(1, window // _TURNS)
    below = (
        f"One pair of a query, dark to light: the fastest at positions 0, 1, 2, ..., the others at 0, {step}, "
        f"{2 * step}, ... within the original window."
    )
    summaries = []
    with sheet(path, "Rotary pairs in the plane", below, rows=len(subjects), columns=3, height=2.4, dark=dark) as page:
        for row, subject in enumerate(subjects):
            lengths = numbers.wavelengths(subject)
            dims = torch.arange(2 * len(lengths))
            is_half = getattr(subject.scheme, "layout", "half") == "half"
            members = (dims.view(2, -1).T if is_half else dims.view(-1, 2)).tolist()
            vector = torch.zeros(subject.geometry.head_dim)
            vector[[first_dim for first_dim, _ in members]] = 1.0
            for column, pair in enumerate((0, len(members) // 2, len(members) - 1)):
                panel = page.panels[3 * row + column]
                positions = torch.arange(0, window, 1 if pair == 0 else step)[:_TURNS]
                first_dim, second_dim = members[pair]
                rotated = numbers.turned(subject, vector, positions).numpy()
                panel.plot(
                    _CIRCLE.cos().numpy(), _CIRCLE.sin().numpy(), color=page.colours["grid"], linewidth=0.8, zorder=1
                )
                panel.scatter(
                    rotated[:, first_dim],
                    rotated[:, second_dim],
                    c=positions.numpy(),
                    cmap="cividis",
                    s=14,
                    zorder=2,
                    edgecolors=page.colours["faint"],
                    linewidths=0.4,
                )
                panel.set(xlim=(-1.4, 1.4), ylim=(-1.4, 1.4), aspect="equal")
                turn = f"{lengths[pair]:,.0f} tokens per turn" if lengths[pair].isfinite() else "does not rotate"
                page.name(panel, f"{subject.name}, pair {pair}\n{turn}")
            within, size = window / lengths[-1], float(numbers.turned(subject, vector, positions).norm(dim=-1)[0])
            longer = size / float(vector.norm())
            summaries.append(
                f"{subject.name}: within the window the slowest pair makes {within:.3g} of a turn"
                + (f"; cos and sin are times {longer:.3g}" if abs(longer - 1) > 1e-4 else "")
            )
    return summaries
