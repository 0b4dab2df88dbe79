"""The pictures of a results.json."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hf_posswap.comparison.report.looks import model_numbers
from hf_posswap.comparison.report.results import ModelEntry, Results
from hf_posswap.comparison.report.words import differences_of, finding, losses_by_position, scores_by_length
from hf_posswap.errors import MissingDependencyError
from hf_posswap.plotting import (
    Cell,
    Curve,
    Point,
    draw_difference_by_length,
    draw_loss_by_position,
    draw_passkey,
    draw_perplexity_by_length,
)

DIFFERENCE, PERPLEXITY = "difference-by-length.png", "perplexity-by-length.png"
LOSS, PASSKEY = "loss-by-position.png", "passkey.png"
_FIRST_POSITION = 16  # the loss of a document's first tokens would dominate the scale


def require_pictures() -> None:
    """Check that pictures can be drawn before anything is measured.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError("matplotlib", "plot")


def draw_pictures(results: Results, folder: Path) -> list[str]:
    """Draw the pictures of `results` into `folder` and return their file names; unmeasured metrics have no picture.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: the folder cannot be written.
    """
    window, models = results["window"], results["models"]
    below = f"{results['data']['documents']} documents, first {max(results['lengths']):,} tokens; bands: 95 %"
    drawn = []
    numbers = model_numbers(results)
    sliding = results["sliding"]
    if (differences := differences_of(results)) is not None:
        paired = f"{results['data']['documents']} documents, differences paired by document; bars: 95 % intervals"
        points = {
            name: tuple(Point(row["length"], row["difference"], row["low"], row["high"]) for row in rows)
            for name, rows in differences.rows.items()
        }
        draw_difference_by_length(
            [_curve(numbers[name], name, models[name], own) for name, own in points.items()],
            window,
            folder / DIFFERENCE,
            title=finding(results),
            baseline=f"{differences.baseline} (baseline)",
            below=paired,
        )
        drawn.append(DIFFERENCE)
    by_length = [_length_curve(numbers[name], name, model) for name, model in models.items() if scores_by_length(model)]
    if by_length:
        by_length += [_length_curve(None, sliding["name"], sliding)] if sliding else []
        draw_perplexity_by_length(by_length, window, folder / PERPLEXITY, below=below)
        drawn.append(PERPLEXITY)
    by_position = [
        _position_curve(numbers[name], name, model) for name, model in models.items() if losses_by_position(model)
    ]
    if by_position:
        by_position += [_position_curve(None, sliding["name"], sliding)] if sliding else []
        draw_loss_by_position(by_position, window, folder / LOSS, below=below)
        drawn.append(LOSS)
    grids = {
        name: [Cell(c["length"], c["depth"], c["share"], c["answer_nll"]) for c in model["passkey"]["cells"]]
        for name, model in models.items()
        if model.get("passkey")
    }
    if grids:
        lengths = sorted({cell.length for cells in grids.values() for cell in cells})
        trials = results["settings"]["trials"]
        draw_passkey(
            grids,
            lengths,
            window,
            folder / PASSKEY,
            below=f"share of {trials} found; hatched: cannot run",
            numbers=numbers,
        )
        drawn.append(PASSKEY)
    return drawn


def _length_curve(number: int | None, name: str, model: ModelEntry) -> Curve:
    """Return the curve of the `number`-th model, or of the sliding window, which has no number."""
    points = (Point(row["length"], row["perplexity"], row["low"], row["high"]) for row in scores_by_length(model))
    return _curve(number, name, model, tuple(points))


def _position_curve(number: int | None, name: str, model: ModelEntry) -> Curve:
    rows = [row for row in losses_by_position(model) if row["start"] >= _FIRST_POSITION] or losses_by_position(model)
    points = (
        Point((max(row["start"], 0.5) * row["stop"]) ** 0.5, row["loss"], row["low"], row["high"]) for row in rows
    )
    return _curve(number, name, model, tuple(points))


def _curve(number: int | None, name: str, model: ModelEntry, points: tuple[Point, ...]) -> Curve:
    ends = next(iter(model.get("cannot_run", {}).values()), None)
    return Curve(name, points, ends, reference=number is None, number=number)
