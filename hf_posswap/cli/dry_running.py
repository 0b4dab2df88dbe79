"""What `posswap train --dry-run` does and prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from hf_posswap.cli.outcome import Code
from hf_posswap.cli.output import show_json, show_pairs, show_text

if TYPE_CHECKING:
    from hf_posswap.training.config import Recipe
    from hf_posswap.training.dryrun import DryRun
    from hf_posswap.training.dryrun.prediction import Prediction
    from hf_posswap.utils.progress import Reporter


def run_dry(
    recipe: Recipe, reporter: Reporter | None, *, gpu: str | None, accelerate: str | None, processes: int | None
) -> DryRun:
    """Predict the memory, steps and time of the training that `recipe` describes.

    Args:
        recipe: the training.
        reporter: prints progress; None: prints nothing.
        gpu: name or memory of a GPU.
        accelerate: an accelerate config file, or the name of one in the package.
        processes: the number of GPUs.

    Raises:
        UnknownNameError, OptionError: no such GPU, or no such file.
        PosswapError: as `dry_run`.
    """
    from hf_posswap.training.dryrun import dry_run

    return dry_run(
        recipe,
        gpu=gpu,
        accelerate=accelerate,
        processes=processes,
        say=None if reporter is None else reporter.line,
    )


def show_dry_run(report: DryRun, *, json: bool) -> None:
    """Print a dry run as tables or as JSON; if the training does not fit, exit with `Code.UNSUPPORTED`."""
    if json:
        show_json(report.to_dict())
    else:
        _show(report)
    if report.fits is False:
        raise typer.Exit(Code.UNSUPPORTED)


def _show_total(predictions: Sequence[Prediction]) -> None:
    from hf_posswap.training.dryrun.prediction import total_row

    show_text("")
    show_pairs([total_row(predictions)])


def _show(report: DryRun) -> None:
    for prediction in report.predictions:
        if prediction.phase:
            show_text(prediction.phase)
        show_pairs(prediction.rows())
    show_text(*report.said)
    _show_total(report.predictions)
    if report.change is not None:
        show_text("", f"The smallest change that makes it fit: {report.change.said}")
        for prediction in report.changed:
            show_pairs(prediction.rows())
        _show_total(report.changed)
    elif report.fits is False:
        show_text("", "No change that is known here makes it fit: take a shorter data.length, or a larger GPU.")
