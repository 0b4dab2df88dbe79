"""The three pictures of a results.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_posswap.plotting import Cell, Curve, Point, draw_loss_by_position, draw_passkey, draw_perplexity_by_length
from hf_posswap.quickstart.variants import CONTROL

SLIDING = "control, sliding window"
PERPLEXITY, LOSS, PASSKEY = "perplexity-by-length.png", "loss-by-position.png", "passkey.png"
_FIRST_POSITION = 16  # the first tokens of a document cost so much that they would flatten all else


def draw_pictures(results: dict[str, Any], out: Path) -> list[str]:
    """Draw what `results` holds into `out` and return the names of the files.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        CheckpointError: the folder cannot be written.
    """
    data, window = results["data"], results["model"]["window"]
    below = (
        f"{data['held_out_documents']} held-out documents, first {max(results['lengths']):,} tokens of each; "
        "bands: 95 % over documents"
    )
    models = results["models"]
    sliding = {SLIDING: models[CONTROL]["sliding"]}
    by_length = [_length_curve(name, entry) for name, entry in (models | sliding).items()]
    draw_perplexity_by_length(by_length, window, out / PERPLEXITY, below=below)
    by_position = [_position_curve(name, entry) for name, entry in (models | sliding).items()]
    draw_loss_by_position(by_position, window, out / LOSS, below=below)
    grids = {name: [_cell(cell) for cell in entry["passkey"]] for name, entry in models.items()}
    if not any(grids.values()):
        return [PERPLEXITY, LOSS]
    passkey = results["passkey"]
    below = f"share of {passkey['trials']} hidden numbers found, mean loss of the answer; hatched: cannot run"
    draw_passkey(grids, passkey["lengths"], window, out / PASSKEY, below=below)
    return [PERPLEXITY, LOSS, PASSKEY]


def _length_curve(name: str, entry: dict[str, Any]) -> Curve:
    rows = [row for row in entry["lengths"] if "cannot_run" not in row]
    points = tuple(Point(row["length"], row["perplexity"], row["low"], row["high"]) for row in rows)
    return Curve(name, points, entry.get("ends"), reference=name == SLIDING)


def _position_curve(name: str, entry: dict[str, Any]) -> Curve:
    rows = entry["positions"]
    rows = [row for row in rows if row["start"] >= _FIRST_POSITION] or rows
    middle = [(row["start"] * row["stop"]) ** 0.5 for row in rows]
    points = (Point(x, row["loss"], row["low"], row["high"]) for x, row in zip(middle, rows, strict=True))
    return Curve(name, tuple(points), entry.get("ends"), reference=name == SLIDING)


def _cell(cell: dict[str, Any]) -> Cell:
    return Cell(cell["length"], cell["depth"], cell["exact"] / cell["trials"], cell["answer_nll"])
