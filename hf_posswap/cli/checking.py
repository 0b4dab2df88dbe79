"""`posswap check`: does a model do what its config says about positions?"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posswap.cli.arguments import Json, TrustRemoteCode, source_of
from hf_posswap.cli.outcome import Code, line_of
from hf_posswap.cli.output import quiet_library, show_json, show_pairs, show_table, show_text
from hf_posswap.errors import OptionError, PosswapError
from hf_posswap.utils.format import said_by

if TYPE_CHECKING:
    from hf_posswap.checking.report import CheckReport


def check(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A folder with a checkpoint or a PEFT adapter, a GGUF file, or a Hub id.",
            show_default=False,
        ),
    ] = None,
    imported: Annotated[
        str | None,
        typer.Option(
            "--import",
            metavar="MODULE:NAME",
            help="Instead of MODEL: a live model, or a function that returns one, in a module of the current folder or "
            "an installed one. The module is run.",
            show_default=False,
        ),
    ] = None,
    forward: Annotated[
        bool | None,
        typer.Option(
            "--forward/--no-forward",
            help="Load the weights and run a few tokens. Default: up to 2e9 parameters.",
            show_default=False,
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 on warnings and on checks that failed to run, too.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Check whether a model does what its config says about positions: any transformers model, swapped or not.

    Compares the angles in force with the config and with the papers' formulas, the config with its config.json, lengths
    with tables and tokenizers, and a few tokens alone with the same tokens padded and packed. Includes what posswap
    doctor finds in the files. Nothing is written. The exit code is 0 if there are no errors in what was checked (with
    --strict: nor warnings, nor checks that failed to run), 1 if there are, and 2 if nothing can be checked. What was
    not checked is listed with the reason.

    Example: posswap check my-llama
    """
    if (model is None) == (imported is None):
        raise OptionError("give either MODEL, a folder or a Hub id, or --import MODULE:NAME.")
    try:
        with quiet_library():
            from hf_posswap.checking.run import check as check_model

            live: Any = source_of(model) if model is not None else _imported(str(imported))
            report = check_model(live, forward=forward, trust_remote_code=trust_remote_code)
    except (PosswapError, OSError) as error:
        typer.echo(f"error: {line_of(error)}", err=True)
        raise typer.Exit(Code.USAGE) from None
    if json:
        show_json(report.to_dict())
    else:
        _show(report)
    if not (report.clean and report.complete if strict else report.ok):
        raise typer.Exit(Code.OTHER)


def _imported(text: str) -> Any:
    """Return the model that "module:name" names: an object, or what a function of that name returns.

    Raises:
        OptionError: there is no such module or name, or its code fails.
    """
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise OptionError(f"--import takes MODULE:NAME, as in my_build:model; got {text!r}.")
    sys.path.insert(0, os.getcwd())
    try:
        value: Any = importlib.import_module(module)
        for attribute in name.split("."):
            value = getattr(value, attribute)
        return value() if callable(value) and not hasattr(value, "config") else value
    except Exception as error:  # somebody's own code may raise anything
        raise OptionError(f"--import {text}: {type(error).__name__}: {said_by(error)}") from error
    finally:
        sys.path.remove(os.getcwd())


def _show(report: CheckReport) -> None:
    show_pairs([("model", report.source), ("checked", "; ".join(report.checked) or "nothing")])
    show_text("")
    if report.findings:
        rows = [(f"{each.severity} {each.code}", each.where, f"{each.what} {each.do}") for each in report.findings]
        show_table(["finding", "where", "what, and what to do"], rows)
    else:
        show_text("Nothing found." if report.complete else "Nothing found in what was checked.")
    if report.skipped:
        show_text("", *(f"Not checked: {line}" for line in report.skipped))
