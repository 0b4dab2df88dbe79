"""`posswap quickstart`: the main job, end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_posswap.cli.arguments import TrustRemoteCode, source_of
from hf_posswap.cli.output import console, quiet_library
from hf_posswap.utils.user_paths import expand_home


def quickstart(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The folder for results and models.")] = Path(
        "posswap-quickstart"
    ),
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A causal model to start from, a folder or a Hub id. Default: the small model of the package.",
            show_default=False,
        ),
    ] = None,
    schemes: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="From rope, alibi, sinusoidal; for a rotary model from yarn, ntk, alibi, nope. Default: all of them, "
            "or rope and alibi for the small model.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", help="Training steps of each model. Default: 200.", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps, ...")] = "auto",
    seed: Annotated[int, typer.Option(help="Random seed of data order, test cases and the continuation.")] = 0,
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where tokens are cached. Default: the user's cache folder.",
            show_default=False,
        ),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Swap the positions of a language model, adapt each copy by its recipe, and compare all far beyond the window.

    Starts from a small GPT-2 with 128 learned positions that comes with the package (or from --model), swaps copies of
    it to RoPE and ALiBi, trains each by its recipe, as posswap train does, and trains a control without a swap on as
    many tokens. Then it compares all of them, and the control's sliding window, at 1, 2, 4 and 8 times the window, as
    posswap compare does, and loads the best one in a fresh process. DIR gets report.html, results.json, tables,
    pictures, and a folder for each training. Ctrl-C keeps what is finished; the same command resumes. It needs the
    extras "train" and "plot".

    Example: posswap quickstart --out first-results
    """
    source = None if model is None else source_of(model)
    progress = console()  # on stdout, which the block below redirects
    with quiet_library():
        from hf_posswap.quickstart import run_quickstart

        run_quickstart(
            expand_home(out),
            model=source,
            schemes=None if schemes is None else [name.strip() for name in schemes.split(",")],
            steps=steps,
            device=device,
            seed=seed,
            cache=cache,
            console=progress,
            trust_remote_code=trust_remote_code,
        )
