"""`posswap quickstart`: the main job, end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_posswap.cli.arguments import TrustRemoteCode, source_of
from hf_posswap.cli.output import console, quiet_library


def quickstart(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder for results and models.")] = Path(
        "posswap-quickstart"
    ),
    model: Annotated[
        str | None,
        typer.Option(
            metavar="ID_OR_PATH",
            help="A causal model to start from, a folder or a Hub id; without it a small one is trained and kept.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", help="Steps that each swapped model is trained.", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps, ...")] = "auto",
    seed: Annotated[int, typer.Option(help="Of everything random: weights, data order, test cases.")] = 0,
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where the trained start model is kept; without it the user's cache folder.",
            show_default=False,
        ),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Swap the positions of a language model four ways, adapt each copy, and measure all far beyond the window.

    Trains a small model with learned positions on Python's own documentation (or takes --model), swaps copies of it to
    RoPE, sinusoidal, ALiBi and a longer learned table, trains each for the same few steps, and measures them at 1, 2, 4
    and 8 times the window. In DIR come results.json, curves.csv, pictures, report.md, and the best model. Ctrl-C keeps
    what is finished; the same command goes on from there. It needs the extra "plot" for the pictures.

    Example: posswap quickstart --out first-results
    """
    source = None if model is None else source_of(model)
    progress = console()  # on stdout, which the block below takes away
    with quiet_library():
        from hf_posswap.quickstart import run_quickstart

        run_quickstart(
            out.expanduser(),
            model=source,
            steps=steps,
            device=device,
            seed=seed,
            cache=cache,
            console=progress,
            trust_remote_code=trust_remote_code,
        )
