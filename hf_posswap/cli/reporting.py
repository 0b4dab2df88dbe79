"""`posswap report`: rebuilds the HTML page of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_posswap.cli.output import show_text
from hf_posswap.utils.user_paths import expand_home


def report(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="RESULTS",
            help="The folder that posswap eval or compare wrote, or its results.json.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="The page. Default: report.html in the folder.", show_default=False
        ),
    ] = None,
) -> None:
    """Rebuild the HTML page of an evaluation from its results.json.

    posswap eval and compare write the page themselves; use this for results that were moved or changed. The page is one
    file and needs no network.

    Example: posswap report results
    """
    from hf_posswap.errors import CheckpointError, OptionError
    from hf_posswap.report import PAGE, write_html
    from hf_posswap.utils.atomic_io import read_json

    source = expand_home(results)
    source = source / "results.json" if source.is_dir() else source
    if not source.is_file():
        raise CheckpointError(
            f"{source} does not exist; give the folder that posswap eval or compare wrote with --out."
        )
    page = source.with_name(PAGE) if out is None else expand_home(out)
    if page.is_dir() or page == source:
        raise OptionError(f"--out {page}: expected a file for the page, such as {PAGE}.")
    write_html(read_json(source), page)
    show_text(f"The page is {page}.")
