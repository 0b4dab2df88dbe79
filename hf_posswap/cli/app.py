"""The Typer application: its commands, and how it starts."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated

import typer

from hf_posswap.cli import (
    advising,
    comparing,
    doctor,
    evaluating,
    export,
    key_spans,
    listing,
    lm_eval,
    push,
    recipes,
    reporting,
    searching,
    selfcheck,
    show,
    starting,
    swapping,
    to_native,
    training,
)
from hf_posswap.cli.outcome import DEBUG, MEANING, PosswapGroup, note_interrupts
from hf_posswap.cli.scheme_command import SchemeCommand
from hf_posswap.utils.printable import printable

_EPILOG = "\n\n".join(
    [
        "Exit codes: " + "; ".join(f"{code.value} {meaning}" for code, meaning in MEANING.items()) + ".",
        f"An error is one line on stderr; {DEBUG}=1 in the environment shows where it happened.",
    ]
)

app = typer.Typer(
    name="posswap",
    cls=PosswapGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(requested: bool) -> None:
    if requested:
        from hf_posswap.cli.versions import version_lines

        typer.echo("\n".join(version_lines()))
        raise typer.Exit


@app.callback()
def posswap(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Print the version, the tested and the installed versions.",
        ),
    ] = False,
) -> None:
    """Swap the position mechanism of a pretrained transformers model, and prove what the swap did.

    Begin with: posswap explain MODEL
    """


app.command()(listing.schemes)
app.command()(listing.families)
app.command(cls=SchemeCommand)(swapping.explain)
app.command()(advising.advise)
app.command(cls=SchemeCommand)(show.show)
app.command(cls=SchemeCommand)(swapping.patch)
app.command()(to_native.to_native)
app.command()(doctor.doctor)
app.command()(selfcheck.selfcheck)
app.command()(export.export)
app.command()(push.push)
app.command()(searching.search)
app.command()(recipes.recipes)
app.command()(training.train)
app.command("eval", cls=SchemeCommand)(evaluating.evaluate)
app.command(cls=SchemeCommand)(comparing.compare)
app.command()(key_spans.key_spans)
app.command()(reporting.report)
app.command("lm-eval", cls=SchemeCommand)(lm_eval.lm_eval)
app.command()(starting.quickstart)


def main() -> None:
    """Run `posswap` on the process's arguments and leave with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a C locale has no theta: no reason to die
    warnings.showwarning = _show_warning
    note_interrupts()
    # While torch's threads wait for each other they spin by default, and on a busy machine take the time of the threads
    # they wait for (recipes/bench/results/busy.json). It has to be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    app(prog_name="posswap")


def _show_warning(message: Warning | str, *where: object, **more: object) -> None:
    typer.echo(f"warning: {printable(' '.join(str(message).split()))}", err=True)
