"""What `posswap train --dry-run` does and prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from hf_posswap.cli.outcome import Code
from hf_posswap.cli.output import show_json, show_pairs, show_text

if TYPE_CHECKING:
    from hf_posswap.training.config import Recipe
    from hf_posswap.training.dryrun import DryRun
    from hf_posswap.utils.progress import Reporter


def run_dry(
    recipe: Recipe, reporter: Reporter | None, *, gpu: str | None, accelerate: str | None, processes: int | None
) -> DryRun:
    """Return what `recipe` would hold and do.

    Args:
        recipe: of the training.
        reporter: shows what is tried; None: nothing is shown.
        gpu: name or memory of a card.
        accelerate: file of a launch, or its name.
        processes: GPUs.

    Raises:
        UnknownNameError, OptionError: no such card, or no such file.
        PosswapError: as `dry_run`.
    """
    from hf_posswap.training.dryrun import card_of, dry_run, launch_file

    return dry_run(
        recipe,
        card=None if gpu is None else card_of(gpu),
        accelerate=None if accelerate is None else launch_file(accelerate),
        processes=processes,
        say=None if reporter is None else reporter.line,
    )


def show_dry_run(found: DryRun, *, json: bool) -> None:
    """Print what a dry run found, as tables or as JSON; where it does not fit, end as what is not supported ends."""
    if json:
        show_json(found.to_dict())
    else:
        _show(found)
    if found.fits is False:
        raise typer.Exit(Code.UNSUPPORTED)


def _show(found: DryRun) -> None:
    for one in found.predictions:
        if one.phase:
            show_text(one.phase)
        show_pairs(one.rows())
    show_text(*found.said)
    if found.change is not None:
        show_text("", f"The smallest change that makes it fit: {found.change.said}")
        for one in found.changed:
            show_pairs(one.rows())
    elif found.fits is False:
        show_text("", "No change that is known here makes it fit: take a shorter data.length, or a larger GPU.")
