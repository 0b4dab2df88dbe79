"""The Typer application: its commands, and how it starts."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated

import typer

from hf_posswap.cli import (
    advising,
    comparing,
    evaluating,
    key_spans,
    listing,
    lm_eval,
    recipes,
    reporting,
    searching,
    shipping,
    show,
    starting,
    swapping,
    training,
)
from hf_posswap.cli.outcome import DEBUG, MEANING, OneNameCommand, PosswapGroup, note_interrupts
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
        from hf_posswap.cli.listing import version_lines

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
    imported: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="FILE",
            help="Run a Python file, or an installed module, that registers schemes of your own. It may also stand "
            "behind the command. Repeatable.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Swap the position mechanism of a pretrained transformers model, and prove what the swap did.

    Begin with: posswap explain MODEL
    """
    for name in imported or ():
        from hf_posswap.utils.user_paths import import_module

        import_module(name)


BEGIN, SWAP, ADAPT, MEASURE, SHIP, LOOK_UP = "Begin", "Swap", "Adapt", "Measure", "Ship", "Look up"
_COMMANDS: tuple[tuple[str, str, Callable[..., None], type[OneNameCommand]], ...] = (
    (BEGIN, "quickstart", starting.quickstart, OneNameCommand),
    (BEGIN, "advise", advising.advise, OneNameCommand),
    (SWAP, "explain", swapping.explain, SchemeCommand),
    (SWAP, "patch", swapping.patch, SchemeCommand),
    (SWAP, "show", show.show, SchemeCommand),
    (ADAPT, "recipes", recipes.recipes, OneNameCommand),
    (ADAPT, "train", training.train, OneNameCommand),
    (ADAPT, "search", searching.search, OneNameCommand),
    (MEASURE, "eval", evaluating.evaluate, SchemeCommand),
    (MEASURE, "compare", comparing.compare, SchemeCommand),
    (MEASURE, "key-spans", key_spans.key_spans, OneNameCommand),
    (MEASURE, "lm-eval", lm_eval.lm_eval, SchemeCommand),
    (MEASURE, "report", reporting.report, OneNameCommand),
    (SHIP, "check", shipping.check, OneNameCommand),
    (SHIP, "doctor", shipping.doctor, OneNameCommand),
    (SHIP, "to-native", shipping.to_native, OneNameCommand),
    (SHIP, "export", shipping.export, OneNameCommand),
    (SHIP, "overrides", shipping.overrides, SchemeCommand),
    (SHIP, "push", shipping.push, OneNameCommand),
    (LOOK_UP, "schemes", listing.schemes, OneNameCommand),
    (LOOK_UP, "families", listing.families, OneNameCommand),
    (LOOK_UP, "support", listing.support, OneNameCommand),
    (LOOK_UP, "selfcheck", listing.selfcheck, OneNameCommand),
)
"""The group of each command in `posswap --help`, its name, its function, and the class that parses it."""

for group, name, command, command_class in _COMMANDS:
    app.command(name, cls=command_class, rich_help_panel=group)(command)


def main() -> None:
    """Run `posswap` on the process's arguments and leave with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a C locale has no theta: no reason to die
    warnings.showwarning = _show_warning
    note_interrupts()
    # While torch's threads wait for each other they spin by default, and on a busy machine take the time of the threads
    # they wait for (recipes/bench/results/busy.json). It has to be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # bars that transformers draws without asking its own setting
    app(prog_name="posswap")


def _show_warning(message: Warning | str, *where: object, **more: object) -> None:
    typer.echo(f"warning: {printable(' '.join(str(message).split()))}", err=True)
