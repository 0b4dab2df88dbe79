"""The pictures of a results.json."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hf_posswap.errors import MissingDependencyError
from hf_posswap.plotting import Cell, Curve, Point, draw_loss_by_position, draw_passkey, draw_perplexity_by_length

PERPLEXITY, LOSS, PASSKEY = "perplexity-by-length.png", "loss-by-position.png", "passkey.png"
_FIRST_POSITION = 16  # the first tokens of a document cost so much that they would flatten all else


def require_pictures() -> None:
    """Check that pictures can be drawn, before hours are spent on what they show.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError("matplotlib", "plot")


def draw_pictures(results: dict[str, Any], folder: Path) -> list[str]:
    """Draw what `results` holds into `folder` and return the names of the files; what was not measured has none.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: the folder cannot be written.
    """
    window, models = results["window"], results["models"]
    below = f"{results['data']['documents']} documents, first {max(results['lengths']):,} tokens; bands: 95 %"
    drawn = []
    by_length = [_length_curve(name, model) for name, model in models.items() if model.get("ppl_prefix")]
    if by_length:
        draw_perplexity_by_length(by_length, window, folder / PERPLEXITY, below=below)
        drawn.append(PERPLEXITY)
    by_position = [_position_curve(name, model) for name, model in models.items() if model.get("nll_pos")]
    if by_position:
        draw_loss_by_position(by_position, window, folder / LOSS, below=below)
        drawn.append(LOSS)
    grids = {name: _cells(model) for name, model in models.items() if model.get("passkey")}
    if grids:
        lengths = sorted({cell.length for cells in grids.values() for cell in cells})
        trials = results["settings"]["trials"]
        draw_passkey(grids, lengths, window, folder / PASSKEY, below=f"share of {trials} found; hatched: cannot run")
        drawn.append(PASSKEY)
    return drawn


def _length_curve(name: str, model: dict[str, Any]) -> Curve:
    rows = model["ppl_prefix"]
    points = tuple(Point(row["length"], row["perplexity"], row["low"], row["high"]) for row in rows)
    return Curve(name, points, next(iter(model["cannot_run"].values()), None))


def _position_curve(name: str, model: dict[str, Any]) -> Curve:
    rows = [row for row in model["nll_pos"] if row["start"] >= _FIRST_POSITION] or model["nll_pos"]
    points = (Point((row["start"] * row["stop"]) ** 0.5, row["loss"], row["low"], row["high"]) for row in rows)
    return Curve(name, tuple(points), next(iter(model["cannot_run"].values()), None))


def _cells(model: dict[str, Any]) -> list[Cell]:
    return [Cell(c["length"], c["depth"], c["share"], c["answer_nll"]) for c in model["passkey"]["cells"]]
